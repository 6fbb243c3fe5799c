"""The page at /ui, in a headless Chromium that may reach nothing but the server."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import httpx
import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from server_process import kill_engine, wait_until

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
DRIVER = shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="needs Chromium and its driver, of the operating system"
)
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync "
    "--disable-dev-shm-usage --disable-background-networking --disable-component-update "
    "--window-size=1200,800"
)


@pytest.fixture(scope="module")
def server(process_server):
    return process_server


@pytest.fixture
def browser(server, tmp_path):
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in FLAGS.split():
        options.add_argument(flag)
    options.add_argument(f"--user-data-dir={tmp_path}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(DRIVER))
    try:
        driver.get(f"{server.url}/ui")
        yield driver
        complaints = [line for line in driver.get_log("browser") if line["level"] == "SEVERE"]
        assert complaints == []
        asked = [line["message"] for line in driver.get_log("performance")]
        for message in asked:
            if '"Network.requestWillBeSent"' in message:
                url = message.split('"url":"')[1].split('"')[0]
                assert url.startswith((server.url, "data:", "chrome")), url
    finally:
        driver.quit()


def find(browser, name):
    return browser.find_element(By.ID, name)


def answers(browser):
    return browser.find_elements(By.CSS_SELECTOR, ".message.assistant")


def notes(browser):
    """What is said below each answer once it has ended."""
    found = browser.find_elements(By.CSS_SELECTOR, ".message.assistant .note")
    return [note.text for note in found]


def keep(browser, name):
    """Save a screenshot where PAGEDLLM_SCREENSHOTS says, to be looked at."""
    if folder := os.environ.get("PAGEDLLM_SCREENSHOTS"):
        browser.save_screenshot(str(Path(folder) / f"{name}.png"))


def fill(browser, name, text):
    field = find(browser, name)
    field.clear()
    field.send_keys(text)


def test_a_chat_streams_counts_and_goes_on(browser, server):
    wait_until(lambda: find(browser, "state").text.startswith("ready"))
    fill(browser, "max_tokens", "200")
    fill(browser, "temperature", "0")
    browser.execute_script(
        "window.changes = 0;"
        "new MutationObserver((all) => { window.changes += all.length; }).observe("
        "document.getElementById('messages'), {subtree: true, childList: true});"
    )
    find(browser, "input").send_keys("Tell me <b>something</b>.", Keys.ENTER)
    wait_until(lambda: notes(browser) and "length" in notes(browser)[0])
    # It grew before our eyes; a busy server sends several tokens together.
    assert browser.execute_script("return window.changes") > 5
    assert "200 tokens" in answers(browser)[0].text
    assert "<b>something</b>" in browser.find_element(By.CSS_SELECTOR, ".message.user").text
    body = {"messages": [{"role": "user", "content": "Tell me <b>something</b>."}]}
    body |= {"max_tokens": 200, "temperature": 0, "top_p": 0.95}
    whole = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120).json()
    text = answers(browser)[0].find_elements(By.TAG_NAME, "span")[1].get_property("textContent")
    assert text == whole["choices"][0]["message"]["content"]
    find(browser, "input").send_keys("And more?", Keys.ENTER)
    wait_until(lambda: len(notes(browser)) == 2 and "length" in notes(browser)[1])
    keep(browser, "chat")


def test_stop_ends_the_answer_and_frees_the_engine(browser, server):
    wait_until(lambda: find(browser, "state").text.startswith("ready"))
    fill(browser, "max_tokens", "6000")
    find(browser, "input").send_keys("Talk for long.", Keys.ENTER)
    wait_until(lambda: find(browser, "running").text == "1")
    wait_until(lambda: float(find(browser, "rate").text) > 0)
    keep(browser, "running")
    find(browser, "stop").click()
    wait_until(lambda: "stopped" in answers(browser)[0].text)
    wait_until(server.is_idle)
    assert find(browser, "send").is_enabled()
    find(browser, "clear").click()
    assert answers(browser) == []


def colours(browser):
    """How many cells of the page's map have which of its colours, read in their middles."""
    return browser.execute_script(
        "const c = document.getElementById('pages'), pen = c.getContext('2d'), found = {};"
        "if (!map) return found;"
        "for (let cell = 0; cell < map.cells.length; cell += 1) {"
        "  const x = ((cell % map.columns) + 0.4) * map.size;"
        "  const y = (Math.floor(cell / map.columns) + 0.4) * map.size;"
        "  const [r, g, b] = pen.getImageData(x, y, 1, 1).data;"
        "  const hex = '#' + [r, g, b].map((v) => v.toString(16).padStart(2, '0')).join('');"
        "  for (const state of STATES) if (colour(`--${state}`).trim() === hex) {"
        "    found[state] = (found[state] || 0) + 1;"
        "  }"
        "}"
        "return found;"
    )


def test_the_map_shows_every_page_by_its_state(browser, server):
    wait_until(lambda: sum(colours(browser).values()) == 400)
    # A prompt of six whole pages, held by three answers; what each writes is its own.
    body = {"prompt": [7] * 96, "n": 3, "max_tokens": 2000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=120) as answer:
        lines = answer.iter_lines()  # dropping it would close the response
        next(lines)
        wait_until(lambda: "shared 5" in find(browser, "legend").text)
        wait_until(lambda: colours(browser).get("shared", 0) >= 5)
        wait_until(lambda: colours(browser).get("used", 0) >= 3)
        assert sum(colours(browser).values()) == 400
        keep(browser, "pages")
    wait_until(lambda: set(colours(browser)) == {"cached", "free"})
    assert httpx.get(f"{server.url}/stats/pages", timeout=120).json()["pages_per_cell"] == 1


def test_a_large_cache_has_cells_of_several_pages():
    from pagedllm_server.routes import page_map

    assert page_map(bytes([0, 1, 2, 3])) == {"pages": 4, "pages_per_cell": 1, "cells": "0123"}
    states = bytes(10_000) + bytes([1, 0, 3, 2])
    found = page_map(states)
    assert (found["pages"], found["pages_per_cell"]) == (10_004, 3)
    assert len(found["cells"]) == 3335
    # 10,000 pages end in the first place of a cell: one of (0, 1, 0), then (3, 2).
    assert found["cells"][-3:] == "013"
    assert len(page_map(bytes(2**20))["cells"]) == 4096


def test_an_error_is_shown_and_the_engine_is_watched(browser):
    wait_until(lambda: "400 pages" in find(browser, "legend").text)
    fill(browser, "max_tokens", "100000")
    find(browser, "input").send_keys("Too much.", Keys.ENTER)
    wait_until(lambda: browser.find_elements(By.CSS_SELECTOR, ".message.error"))
    assert "max_tokens" in answers(browser)[0].text
    browser.get_log("browser")  # the refused request is reported there, as it should be
    browser.set_window_size(420, 800)
    keep(browser, "narrow")


def test_an_engine_that_dies_is_shown_until_another_serves(browser, server):
    wait_until(lambda: find(browser, "state").text.startswith("ready"))
    kill_engine(server)
    wait_until(lambda: "restarted in" in find(browser, "state").text)
    assert "bad" in find(browser, "state").get_attribute("class")
    keep(browser, "died")
    wait_until(lambda: find(browser, "state").text.startswith("ready, restarted"), 240)
    assert "bad" not in find(browser, "state").get_attribute("class")
    browser.get_log("browser")  # what had no answer meanwhile is reported there
