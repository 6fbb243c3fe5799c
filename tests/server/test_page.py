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

from server_process import serving, wait_until

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
DRIVER = shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="needs Chromium and its driver, of the operating system"
)
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run "
    "--disable-background-networking --disable-component-update --disable-sync "
    "--window-size=1200,800"
)


@pytest.fixture(scope="module")
def server(tiny_with_text):
    with serving(tiny_with_text, "--num-pages", "400") as running:
        yield running


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
    wait_until(lambda: find(browser, "state").text == "ready")
    fill(browser, "max_tokens", "200")
    fill(browser, "temperature", "0")
    browser.execute_script(
        "window.changes = 0;"
        "new MutationObserver((all) => { window.changes += all.length; }).observe("
        "document.getElementById('messages'), {subtree: true, childList: true});"
    )
    find(browser, "input").send_keys("Tell me <b>something</b>.", Keys.ENTER)
    wait_until(lambda: notes(browser) and "length" in notes(browser)[0])
    # It grew before our eyes.
    assert browser.execute_script("return window.changes") > 50
    assert "200 tokens" in answers(browser)[0].text
    assert "<b>something</b>" in browser.find_element(By.CSS_SELECTOR, ".message.user").text
    body = {"messages": [{"role": "user", "content": "Tell me <b>something</b>."}]}
    body |= {"max_tokens": 200, "temperature": 0, "top_p": 0.95}
    whole = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).json()
    text = answers(browser)[0].find_elements(By.TAG_NAME, "span")[1].get_property("textContent")
    assert text == whole["choices"][0]["message"]["content"]
    find(browser, "input").send_keys("And more?", Keys.ENTER)
    wait_until(lambda: len(notes(browser)) == 2 and "length" in notes(browser)[1])
    keep(browser, "chat")


def test_stop_ends_the_answer_and_frees_the_engine(browser, server):
    wait_until(lambda: find(browser, "state").text == "ready")
    fill(browser, "max_tokens", "440")
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


def test_an_error_is_shown_and_the_engine_is_watched(browser):
    wait_until(lambda: "400 pages" in find(browser, "legend").text)
    fill(browser, "max_tokens", "100000")
    find(browser, "input").send_keys("Too much.", Keys.ENTER)
    wait_until(lambda: browser.find_elements(By.CSS_SELECTOR, ".message.error"))
    assert "max_tokens" in answers(browser)[0].text
    drawn = browser.execute_script(
        "const c = document.getElementById('pages');"
        "return new Set(c.getContext('2d').getImageData(0, 0, c.width, c.height).data).size"
    )
    assert drawn > 3
    browser.get_log("browser")  # the refused request is reported there, as it should be
    browser.set_window_size(420, 800)
    keep(browser, "narrow")
