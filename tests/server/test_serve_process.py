"""The process: starting, stopping, dying engines, metrics, and what it is told by flags."""

from __future__ import annotations

import importlib.util
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from pagedllm import ConfigError
from pagedllm_server.cli import parse
from pagedllm_server.life import BackOff
from server_process import ServerProcess, kill_engine, wait_until

LONG = {"inputs": "A", "parameters": {"max_new_tokens": 2000}}


METRICS = """
tgi_request_count tgi_request_success tgi_request_failure
tgi_request_duration_count tgi_request_validation_duration_count
tgi_request_queue_duration_count tgi_request_inference_duration_count
tgi_request_mean_time_per_token_duration_count tgi_request_generated_tokens_count
tgi_request_input_length_count tgi_request_max_new_tokens_count
tgi_queue_size tgi_batch_current_size tgi_batch_current_max_tokens tgi_batch_next_size_count
tgi_batch_inference_count tgi_batch_inference_success tgi_batch_inference_duration_count
tgi_batch_forward_duration_count tgi_batch_decode_duration_count
vllm:num_requests_running vllm:num_requests_waiting vllm:kv_cache_usage_perc
vllm:prefix_cache_queries_total vllm:prefix_cache_hits_total vllm:prompt_tokens_total
vllm:generation_tokens_total vllm:request_success_total vllm:time_to_first_token_seconds_count
vllm:inter_token_latency_seconds_count vllm:e2e_request_latency_seconds_count
vllm:request_queue_time_seconds_count vllm:request_prefill_time_seconds_count
vllm:request_decode_time_seconds_count
pagedllm_pages pagedllm_internal_fragmentation_percent pagedllm_prefix_hit_tokens_total
pagedllm_preemptions_total pagedllm_step_seconds_count pagedllm_batch_size_count
"""
FROM_TGI = """
--model-id m --num-shard 1 --max-total-tokens 100 --hostname ::1 --json-output
--max-batch-prefill-tokens 512 --cuda-memory-fraction 0.5 --api-key a,b
--graceful-termination-timeout 5 --max-batch-total-tokens 1601
"""
FROM_VLLM = """
m --max-num-batched-tokens 512 --max-batch-size 3 --force-max-tokens 9 --batch-timeout-ms 2.5
--disable-log-stats --port 1
"""


# -- life -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(process_server):
    return process_server


def test_it_listens_before_the_model_is_ready_and_then_says_where_it_is(server):
    first = server.seen[0]
    assert first.status_code == 503
    assert first.json() == {"error": "the model is loading", "error_type": "healthcheck"}
    assert int(first.headers["retry-after"]) > 0
    [line] = server.lines
    assert line.startswith(f"pagedllm serves tiny at {server.url} on cpu in float32: ")
    assert re.search(r"MiB of weights and .* of cache, which holds [\d,]+ tokens$", line.strip())


def test_a_second_server_on_the_port_is_one_clear_line(server, tiny_with_text):
    port = server.url.rpartition(":")[2]
    second = subprocess.run(
        [sys.executable, "-m", "pagedllm.cli.main", "serve", str(tiny_with_text), "--port", port],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert second.returncode == 2
    assert second.stderr == (
        f"pagedllm: error: cannot listen on 127.0.0.1:{port}: address already in use; give "
        "another --port or --host\n"
    )


def test_names_that_are_served(server):
    with httpx.Client(base_url=server.url, timeout=120) as http:
        assert [m["id"] for m in http.get("/v1/models").json()["data"]] == ["tiny"]
        for name, status in (("tiny", 200), ("dummy", 200), ("tgi", 200), ("gpt-9", 404)):
            body = {"model": name, "prompt": "A", "max_tokens": 1}
            assert http.post("/v1/completions", json=body).status_code == status


def test_the_commit_of_a_model_of_the_hub_is_said(server):
    assert httpx.get(f"{server.url}/info").json()["model_sha"] == server.sha


def test_a_client_that_takes_nothing_frees_its_pages(server):
    """Twenty alternatives with each token are more than the kernel's buffers hold."""
    parameters = {"max_new_tokens": 6000, "details": True, "top_n_tokens": 20}
    asleep = {"inputs": "A", "parameters": parameters}
    with server.connect("/generate_stream", asleep, buffer=1024) as connection:
        wait_until(lambda: server.stats()["running"] == 1)
        with server.connect("/generate", b'{"inputs": "', 100) as stalling:
            assert stalling.recv(65536).startswith(b"HTTP/1.1 408 ")
        wait_until(lambda: any("took nothing" in line["message"] for line in server.logged()))
        wait_until(server.is_idle)
        with pytest.raises(ConnectionResetError):
            drain(connection)


def drain(connection):
    while connection.recv(65536):
        pass


def test_what_the_engines_process_logs_is_in_the_servers_log(server):
    """What warns there, and the engine's own line of statistics."""
    body = {"prompt": "A", "max_tokens": 1}
    named = {"name": "only", "token_ids": [40], "say": "hello"}
    httpx.post(f"{server.url}/v1/completions", json=body | {"logits_processors": [named]})
    wait_until(lambda: server.logged(target="house"))
    [line] = server.logged(target="house")
    assert (line["level"], line["message"]) == ("WARNING", "asked to say hello")

    def statistics():
        httpx.post(f"{server.url}/v1/completions", json=body)
        return server.logged(target="pagedllm.metrics", level="INFO")

    wait_until(statistics)
    assert "tok/s" in statistics()[0]["message"]


def test_an_engine_that_dies_is_noticed_and_replaced(server):
    """And the second time later than the first, though it had loaded well in between."""
    body = {"inputs": "A", "parameters": {"max_new_tokens": 3}}
    with httpx.Client(base_url=server.url, timeout=120) as http:
        before = http.get("/stats").json()["restarts"]
        with http.stream("POST", "/generate_stream", json=LONG) as response:
            lines = response.iter_lines()
            next(lines)
            kill_engine(server)
            killed = time.monotonic()
            last = [line for line in lines if line][-1]
        error = json.loads(last.removeprefix("data: "))
        assert error["error_type"] == "generation"
        assert "SIGKILL" in error["error"]
        first = delay(http)
        assert http.get("/health").status_code == 503
        assert time.monotonic() - killed < 5  # a second, on a machine that does nothing else
        refused = http.post("/generate", json=LONG)
        assert refused.status_code == 503
        assert "restarted" in refused.json()["error"]
        wait_until(lambda: http.get("/health").status_code == 200)
        assert http.post("/generate", json=body).status_code == 200
        assert http.get("/stats").json()["restarts"] == before + 1
        assert f"pagedllm_engine_restarts_total {before + 1}.0" in http.get("/metrics").text
        kill_engine(server)
        assert delay(http) == 2 * first
        wait_until(lambda: http.get("/health").status_code == 200)
        assert http.get("/stats").json()["restarts"] == before + 2


def delay(http):
    """Seconds until an engine that has just died is started again, once the server says so."""
    found = []

    def said():
        problem = http.get("/stats").json()["problem"]
        found.extend(re.findall(r"restarted in ([\d.]+) s", problem or ""))
        return found

    wait_until(said)
    return float(found[0])


def test_an_engine_that_keeps_dying_is_restarted_ever_more_slowly():
    back_off = BackOff()
    waits = [back_off.next(served=5.0) for _ in range(9)]
    assert waits == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]
    assert [back_off.next(served) for served in (60.0, 59.0, 0.0)] == [0.5, 1.0, 2.0]


def test_metrics_have_the_names_of_every_dashboard(server):
    with httpx.Client(base_url=server.url, timeout=120) as http:
        http.post("/generate", json={"inputs": "A b c", "parameters": {"max_new_tokens": 5}})
        text = http.get("/metrics").text
    samples = dict(
        line.rsplit(" ", 1) for line in text.splitlines() if line and not line.startswith("#")
    )
    names = {name.partition("{")[0] for name in samples}
    wanted = set(METRICS.split())
    assert wanted - names == set()
    assert float(samples["tgi_request_success"]) >= 1
    generated = float(samples['vllm:generation_tokens_total{model_name="tiny"}'])
    assert generated >= 5
    states = {s: float(samples[f'pagedllm_pages{{state="{s}"}}']) for s in ("used", "cached")}
    assert states["used"] == 0
    # Those of NVIDIA's devices, where there is one and the library that asks it.
    gpu = Path("/proc/driver/nvidia/gpus").exists() and importlib.util.find_spec("pynvml")
    assert ("pagedllm_device_utilisation" in names) == bool(gpu)


def test_the_dashboard_asks_for_metrics_that_there_are(server):
    board = json.loads((Path(__file__).parents[2] / "docs" / "grafana.json").read_text())
    text = httpx.get(f"{server.url}/metrics").text
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            for name in re.findall(r"(?:vllm:|tgi_|pagedllm_)\w+", target["expr"]):
                assert name in text, name


def test_a_model_that_is_not_there_is_one_line(tmp_path):
    missing = ServerProcess(tmp_path / "nothing", "--port", "0", wait=False)
    assert missing.process.wait(60) == 2
    missing.stop()
    [line] = [each for each in missing.errors if each.startswith("pagedllm: error")]
    assert "nothing" in line
    assert "Traceback" not in missing.output


def test_a_quantisation_that_is_not_there_is_one_line(tiny_with_text):
    wrong = ServerProcess(tiny_with_text, "--port", "0", "--quantize", "bitsandbytes", wait=False)
    assert wrong.process.wait(120) == 2
    wrong.stop()
    [line] = [each for each in wrong.errors if each.startswith("pagedllm: error")]
    assert "quantization: no plugin registers 'bitsandbytes'; there are int4, int8" in line


# -- flags ----------------------------------------------------------------------------


def test_flags_of_seeds_vllm_and_tgi_mean_the_same():
    config, options, notes = parse(FROM_TGI.split(), {})
    assert (config.model, config.max_model_len, config.max_num_batched_tokens) == ("m", 100, 512)
    assert config.gpu_memory_utilization == 0.5
    assert config.num_pages == 101  # of 16 tokens
    assert (options.host, options.graceful_timeout, options.json_logs) == ("::1", 5.0, True)
    assert options.keys() == ("a", "b")
    assert notes == []
    config, options, _ = parse(FROM_VLLM.split(), {})
    assert (config.max_batch_size, config.force_max_tokens) == (3, 9)
    assert (config.batch_timeout_ms, config.disable_log_stats) == (2.5, True)
    assert options.host == "127.0.0.1"


def test_environment_below_file_below_flags(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("model: {model: file, max_model_len: 20}\nserver: {port: 20, max_best_of: 5}\n")
    environment = {"MODEL_ID": "env", "MAX_TOTAL_TOKENS": "10", "PORT": "10", "MAX_BEST_OF": "3"}
    environment |= {"PAGEDLLM_API_KEY": "secret", "MAX_WAITING_TOKENS": "20", "HOSTNAME": "box"}
    config, options, notes = parse([], environment)
    assert (config.model, config.max_model_len) == ("env", 10)
    assert (options.port, options.max_best_of, options.host) == (10, 3, "127.0.0.1")
    assert options.keys() == ("secret",)
    assert "secret" not in repr(options)
    assert notes == ["the environment variable MAX_WAITING_TOKENS has no meaning here"]
    config, options, _ = parse(["--config", str(file)], environment)
    assert (config.model, config.max_model_len, options.port) == ("file", 20, 20)
    config, options, _ = parse(["x", "--config", str(file), "--port", "30"], environment)
    assert (config.model, config.max_model_len, options.port) == ("x", 20, 30)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--prot", "1"], "unknown flag '--prot'; did you mean '--port'?"),
        (["--port", "x"], "port: "),
        (["--port", "70000"], "port: "),
        (["m", "n"], "unexpected argument 'n'"),
        (["m", "--model", "n"], "the model is given twice"),
        (["--max-waiting-tokens", "2"], "--max-waiting-tokens has no meaning here"),
        (["--lora-adapters", "a"], "adapters are not supported"),
        (["--sharded", "true"], "--sharded has no meaning here"),
        (["--kv-cache-dtype", "fp8_e5m2"], "kv_cache_dtype: 'fp8_e5m2' is not one of auto, int8"),
        (["--enable-fp8"], "--enable-fp8: no plugin that is installed has a method 'fp8'; use "),
        (["--enable-fp8", "--quantization", "int8"], "--enable-fp8 and --quantization int8"),
        (["--enable-fp8", "--quantize", "int8"], "--enable-fp8 and --quantization int8"),
        (["--ssl-certfile", "a"], "ssl_certfile and ssl_keyfile belong together"),
        (["--api-key", " "], "api_key is empty"),
        (["--max-total-tokens", "many"], "max_model_len"),
        (["--scheduling-policy", "lottery"], "scheduling_policy"),
    ],
)
def test_wrong_flags_are_named(flags, said):
    with pytest.raises(ConfigError) as wrong:
        parse(flags, {})
    assert said in str(wrong.value)
    assert "\n" not in str(wrong.value)


def test_launcher_values_that_ask_for_nothing_are_taken():
    quiet = {"KV_CACHE_DTYPE": "auto", "SHARDED": "false"}
    config, _, notes = parse(["m", "--kv-cache-dtype", "auto", "--sharded", "false"], quiet)
    assert config.model == "m"
    assert notes == []
    assert parse(["m"], {"SHARDED": "true"})[2] == [
        "the environment variable SHARDED has no meaning here"
    ]
    assert config.kv_cache_dtype == "auto"


def test_a_cache_in_int8_is_asked_for_by_flag_or_variable():
    assert parse(["m"], {"KV_CACHE_DTYPE": "int8"})[0].kv_cache_dtype == "int8"
    assert parse(["m", "--kv-cache-dtype", "int8"], {})[0].kv_cache_dtype == "int8"
    for arguments, variables in (
        (["m"], {"KV_CACHE_DTYPE": "fp8_e4m3fn"}),
        (["m", "--kv-cache-dtype", "fp8_e4m3fn"], {}),
    ):
        with pytest.raises(ConfigError, match=r"kv_cache_dtype: 'fp8_e4m3fn'.*auto, int8"):
            parse(arguments, variables)


def test_wrong_files_are_named(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("\n \n")
    with pytest.raises(ConfigError, match="no key in"):
        parse(["--api-key-file", str(keys)], {})[1].keys()
    keys.write_text("one\ntwo\n")
    assert parse(["--api-key-file", str(keys)], {})[1].keys() == ("one", "two")
    file = tmp_path / "config.yaml"
    file.write_text("server: {prot: 1}\n")
    with pytest.raises(ConfigError, match="did you mean 'port'"):
        parse(["--config", str(file)], {})


def test_help_is_grouped():
    run = subprocess.run(
        [sys.executable, "-m", "pagedllm.cli.main", "serve", "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    titles = ("address and transport:", "access:", "limits:", "logging and tracing:")
    for title in (*titles, "model settings:"):
        assert title in run.stdout


# -- what everything answers ----------------------------------------------------------


@pytest.fixture(scope="module")
def hasty(tiny_and_long):
    """A server whose requests have little time, and which has little when it is to stop."""
    running = ServerProcess(
        tiny_and_long, "--port", "0", "--threads", "1", "--timeout", "0.3",
        "--graceful-timeout", "0.3", "--log-level", "critical",
    )  # fmt: skip
    yield running
    assert running.stop() == 0, running.output


def test_no_request_that_the_openapi_allows_is_a_server_error(hasty):
    """schemathesis makes requests up from the server's own description of itself."""
    import schemathesis
    from hypothesis import HealthCheck, Phase, given, settings

    schema = schemathesis.openapi.from_url(f"{hasty.url}/openapi.json")
    wrong = []
    for result in schema.get_all_operations():
        operation = result.ok()

        @settings(
            max_examples=8, deadline=None, database=None, phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        @given(case=operation.as_strategy())
        def ask(case):
            answer = case.call(timeout=120)
            if answer.status_code >= 500:
                wrong.append((case.method, case.path, case.body, answer.text))

        ask()
    assert wrong == []


def test_what_does_not_finish_in_time_gets_an_error(hasty):
    body = {"inputs": "A", "parameters": {"max_new_tokens": 8000, "timeout": 1000.0}}
    with httpx.stream("POST", f"{hasty.url}/generate_stream", json=body, timeout=120) as r:
        lines = r.iter_lines()
        next(lines)
        hasty.process.send_signal(signal.SIGTERM)
        last = [line for line in lines if line][-1]
    assert json.loads(last.removeprefix("data: "))["error_type"] == "healthcheck"
    assert hasty.stop(how=None) == 0
