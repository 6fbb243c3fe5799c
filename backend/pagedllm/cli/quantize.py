"""``pagedllm quantize``: what quantising a model, or its pages, saves, and what it does to answers.

Owner: the command line. Invariants: standard output is one line of JSON, and a table for
readers goes to standard error; both models see the same tokens through the engine's own
kernels, so what is measured is what is served.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagedllm.cli.common import UsageError, note, quiet_downloads, read_file
from pagedllm.config import Config

if TYPE_CHECKING:
    import argparse

    import torch

    from pagedllm.models.base import PagedModel

TEXT = """\
The lighthouse keeper climbed the stairs every evening at the same hour. There were two hundred
and twelve of them, and he had counted them so often that his legs knew the number better than
his head did. At the top he wiped the glass, filled the lamp and looked out over the water.

"How far can the light be seen?" the visitor asked. "About eighteen miles when the air is clear,"
he answered, "and not much past the rocks when it is not. Ships keep their own clocks, of course,
but they set them by us." He wrote the date, the wind and the height of the tide into a book.

def tide(hours):
    return 2.1 + 1.4 * math.cos(2 * math.pi * hours / 12.42)

Tides follow the moon: two high waters in a little under twenty-five hours. When the sun and the
moon pull in one line, the range is greatest; a week later it is smallest. In 1953 the sea rose
by more than five metres above its usual level in some places, and the dykes did not hold. What
was built afterwards took forty years, cost billions and has been closed only a few times since.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument("source", metavar="MODEL", help="the model, as --model names it elsewhere")
    parser.add_argument(
        "--report", action="store_true", help="compare its predictions with those of 16 bits"
    )
    parser.add_argument("--text", metavar="FILE", help="text to compare on; none: a built-in one")
    parser.add_argument(
        "--tokens", type=int, default=512, help="most tokens of the text that are used (512)"
    )
    parser.add_argument(
        "--rows",
        type=int,
        default=256,
        help="tokens in a step (256): 1 compares what one stream gets, many what a batch gets",
    )
    Config.add_cli_arguments(parser, exclude=("model",))


def run(options: argparse.Namespace) -> int:
    """Load, measure, print a line of JSON and return the exit status."""
    config = Config.from_cli(options, model=options.source)
    if config.quantization is None and config.kv_cache_dtype == "auto":
        raise UsageError(
            "--quantization METHOD is missing, such as --quantization int8, or --kv-cache-dtype"
        )
    if options.tokens < 2 or options.rows < 1:
        raise UsageError("--tokens must be at least 2 and --rows at least 1")
    text = TEXT if options.text is None else read_file(Path(options.text))
    quiet_downloads()
    report = measure(config.resolve(), text if options.report else None, options)
    print(json.dumps(report))
    width = max(map(len, report))
    note("\n".join(f"{name:{width}}  {value}" for name, value in report.items()))
    return 0


def measure(config: Config, text: str | None, options: argparse.Namespace) -> dict[str, Any]:
    """Compare a model as it was saved with itself quantised; without a text, only its size."""
    import torch

    from pagedllm.client import _load_model, quantizer_for
    from pagedllm.engine.tokenizer import load_tokenizer
    from pagedllm.plugins import resolve_model
    from pagedllm.worker.device import bytes_per_page

    quantizer_for(config)  # refuses an unknown method before anything is loaded
    torch.set_num_threads(config.threads or 1)
    path = str(resolve_model(config.model, config.revision, config).path)
    plain_config = config.replace(quantization=None, quantization_skip=(), kv_cache_dtype="auto")
    plain = _load_model(plain_config, path)
    ids: list[int] = []
    if text is not None:
        tokenizer = load_tokenizer(
            config.tokenizer or path, trust_remote_code=config.trust_remote_code
        )
        longest = min(options.tokens, plain.max_positions or options.tokens)
        ids = list(tokenizer(text)["input_ids"])[:longest]
        if len(ids) < 2:
            raise UsageError("the text has fewer than two tokens; give a longer one")
    wanted = log_probabilities(plain, plain_config, ids, options.rows)
    report: dict[str, Any] = {
        "model": config.model,
        "quantization": config.quantization,
        "skipped": list(config.quantization_skip),
        "kv_cache_dtype": config.kv_cache_dtype,
        "dtype_before": str(plain.dtype).removeprefix("torch."),
        "bytes_before": plain.weight_bytes,
        "page_bytes_before": bytes_per_page(plain_config, plain),
    }
    del plain
    kept = _load_model(config, path)
    report["bytes_after"] = kept.weight_bytes
    report["page_bytes_after"] = bytes_per_page(config, kept)
    report["ratio"] = round(kept.weight_bytes / report["bytes_before"], 4)
    if ids:
        got = log_probabilities(kept, config, ids, options.rows)
        # Kullback and Leibler's divergence, in nats.
        divergence = (wanted.exp() * (wanted - got)).sum(-1)
        agree = (wanted.argmax(-1) == got.argmax(-1)).float().mean()
        report |= {
            "tokens": len(ids),
            "rows": options.rows,
            "kl_mean": round(float(divergence.mean()), 6),
            "kl_max": round(float(divergence.max()), 6),
            "top1_agreement": round(float(agree), 4),
        }
    return report


def log_probabilities(model: PagedModel, config: Config, ids: list[int], rows: int) -> torch.Tensor:
    """float32 [T, V]: of the token that follows each one of a sequence, some rows at a time."""
    import torch

    from pagedllm.models.base import DeviceBatch
    from pagedllm.worker.device import allocate_pages
    from pagedllm_kernels.types import AttentionMetadata

    size, device = config.page_size, model.device
    pages = -(-len(ids) // size)
    cache = allocate_pages(config, model, pages)
    made = [torch.empty((0, model.vocab_size))]
    for begin in range(0, len(ids), rows):
        end = min(begin + rows, len(ids))
        positions = torch.arange(begin, end, device=device)
        metadata = AttentionMetadata(
            query_starts=torch.tensor([0, end - begin], dtype=torch.int32, device=device),
            context_lens=torch.tensor([end], dtype=torch.int32, device=device),
            page_table=torch.arange(pages, dtype=torch.int32, device=device)[None],
            slot_mapping=positions,
            max_query_len=end - begin,
            max_context_len=end,
            page_size=size,
        )
        batch = DeviceBatch(
            token_ids=torch.tensor(ids[begin:end], device=device),
            positions=positions,
            logit_indices=torch.arange(end - begin, device=device),
            attention=metadata,
        )
        made.append(torch.log_softmax(model.forward(batch, cache), -1).cpu())
    return torch.cat(made)
