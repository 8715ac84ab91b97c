"""The page in headless Chromium: what it shows, on a phone, by keyboard, in the dark."""

from __future__ import annotations

import pytest
from chromium import Page, missing
from filled_service import fill
from service_runs import OPTIONS, listening

from autotune.service.service import open_service
from autotune.service.web.app import make_app

pytestmark = pytest.mark.skipif(missing(), reason="Chromium is not installed")


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """A server with a search of 120 trials, and the link to its page that it would print."""
    state = tmp_path_factory.mktemp("page") / "state"
    search_id = fill(state, 120)
    service = open_service(state, None, OPTIONS)
    with listening(make_app(service)) as port:
        yield f"http://127.0.0.1:{port}/#token={service.tokens.make_for_run()}", search_id


def test_a_search_is_shown_on_a_phone_in_the_dark_and_by_keyboard(shown):
    """A row for each trial up to a hundred, and its plan with what its choices bought; nothing is wider than the
    window; the arrow keys go from dot to dot; the background is dark; no error is in the console. Enter opens a search
    of the list, which says when one is tried again."""
    url, search_id = shown
    with Page(390, 844, dark=True) as page:
        page.ask("Page.navigate", url=url)
        page.until("document.querySelectorAll('.card').length === 5")
        assert page.evaluate("location.hash") == "#/"
        assert "has died. Tried again at " in page.evaluate("document.querySelector('.card').textContent")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        page.evaluate(f"document.querySelector('a[href=\"#/{search_id}\"]').focus()")
        page.press("Enter")
        page.until("document.querySelectorAll('tbody tr').length === 100 && document.querySelector('pre').textContent")
        assert page.evaluate("document.querySelector('h2').textContent") == "gpt2-medium on one card"
        bought = page.evaluate("[...document.querySelectorAll('main li')].map(each => each.textContent)")
        assert bought == ["precision 2.00 times the speed without it (1 round)", "batch without it: out of memory"]
        assert "line 7 of the report" in page.evaluate("document.querySelector('pre').textContent")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        page.evaluate("document.querySelector('svg').focus()")
        words = []
        for key in ("ArrowRight", "ArrowRight", "ArrowLeft"):
            page.press(key)
            words.append(page.evaluate("document.querySelector('figcaption').textContent"))
        assert words[0] == words[2] != words[1]
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(14, 17, 22)"
        assert page.complaints == []


def test_a_failed_search_goes_on_with_other_limits(shown):
    """They are asked for beside the button; what is left empty stays as it was."""
    read = "(() => { const asked = new XMLHttpRequest(); "
    read += "asked.open('GET', location.hash.replace('#/', '/v1/searches/'), false)"
    read += "; asked.send(); return JSON.parse(asked.responseText).spec; })()"
    with Page(390, 844) as page:
        page.ask("Page.navigate", url=shown[0])
        page.until("document.querySelector('.card .FAILED')")
        page.evaluate("document.querySelector('.card .FAILED').parentElement.querySelector('a').click()")
        page.until("document.querySelectorAll('label input').length === 2")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        page.evaluate("document.querySelector('label input').value = '2h'")
        page.evaluate("[...document.querySelectorAll('button')].find(each => each.textContent === 'Go on').click()")
        page.until("document.querySelector('.state.QUEUED')")
        assert page.evaluate(f"{read}.max_time") == "7200s"
        assert page.evaluate(f"{read}.trials") == 24
        assert page.complaints == []
