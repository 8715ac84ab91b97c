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
        page.until("document.querySelectorAll('.card').length === 6")
        assert page.evaluate("location.hash") == "#/"
        assert "has died. Tried again at " in page.evaluate("document.querySelector('.card').textContent")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        page.evaluate(f"document.querySelector('a[href=\"#/{search_id}\"]').focus()")
        page.press("Enter")
        page.until("document.querySelectorAll('tbody tr').length === 100 && document.querySelector('pre').textContent")
        assert page.evaluate("document.querySelector('h2').textContent") == "gpt2-medium on one card"
        bought = page.evaluate("[...document.querySelectorAll('main li')].map(each => each.textContent)")
        assert bought[-2:] == ["precision 2.00 times the speed without it (1 round)", "batch without it: out of memory"]
        assert "line 7 of the report" in page.evaluate("document.querySelector('#report').textContent")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        page.evaluate("document.querySelector('svg').focus()")
        words = []
        for key in ("ArrowRight", "ArrowRight", "ArrowLeft"):
            page.press(key)
            words.append(page.evaluate("document.querySelector('figcaption').textContent"))
        assert words[0] == words[2] != words[1]
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(14, 17, 22)"
        assert page.complaints == []


OPEN = "[...document.querySelectorAll('.card a')].find(each => each.textContent === {name!r}).click()"
CLICK = "[...document.querySelectorAll('{where} button')].find(each => each.textContent === {words!r}).click()"


def open_search(page, url, name):
    page.ask("Page.navigate", url=url)
    page.until("document.querySelectorAll('.card').length === 6")
    page.evaluate(OPEN.format(name=name))
    page.until("document.querySelectorAll('tbody tr').length > 0")


def texts(page, selector):
    return page.evaluate(f"[...document.querySelectorAll({selector!r})].map(each => each.textContent)")


def test_a_search_begins_with_what_its_plan_comes_to(shown):
    """Gain with its interval, peak against the budget, the speed; then what was asked for, the plan, and the commands
    that apply it."""
    url, search_id = shown
    with Page(768, 1024) as page:
        open_search(page, url, "gpt2-medium on one card")
        assert texts(page, "section:first-child .figure") == ["1.94x", "7.5 GiB", "41.20"]
        said = " ".join(texts(page, ".fact"))
        for words in ("95 %: 1.90x to 1.98x", "of 8 GiB (94 %)", "9.25 GiB, over the budget"):
            assert words in said
        trials = "trials: 120 of 120: all trials were measured"
        over = f"reading the task: done · {trials} · measuring the best again: round 3 of 3"
        assert texts(page, ".phases-over") == [f"{over} · what each choice bought: round 1"]
        commands, plan = texts(page, ".copied pre")
        assert f"autotune fetch {search_id} -o plan.yaml --server http://127.0.0.1:" in commands
        assert "\nautotune verify plan.yaml train.py:gpt2\n" in commands
        assert plan.startswith("schema: autotune/plan@1\n")
        assert "train.py:gpt2" in texts(page, "dd")
        page.evaluate("document.querySelector('[aria-label=\"Log of trial 103\"]').click()")
        page.until("document.querySelector('dialog pre') !== null")
        assert texts(page, "dialog pre") == ["nothing is kept of what trial 103 printed."]
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_a_gain_that_is_not_proven_is_shown_as_such(shown):
    """In the list and on the search's page: a plan of which two runs did not tell."""
    with Page(1280, 900) as page:
        page.ask("Page.navigate", url=shown[0])
        page.until("document.querySelectorAll('.card').length === 6")
        page.evaluate(
            "import('/static/page.js').then(page => document.querySelector('main').replaceChildren(page.result("
            "{gain: 1.04, low: 0.9, high: 1.2, is_proven: false, why: 'two rounds', settings: 'bf16'})))"
        )
        assert texts(page, ".fact .unproven") == ["not proven"]
        assert "two rounds" in texts(page, ".fact")[0]


def test_the_list_has_owner_age_and_budget_and_can_be_filtered(shown):
    """A failure is its first line; what runs says how far it is."""
    with Page(390, 844) as page:
        page.ask("Page.navigate", url=shown[0])
        page.until("document.querySelectorAll('.card').length === 6")
        cards = texts(page, ".card")
        assert any(
            "by ann, " in each and "within 8 GiB" in each and "1.94x the reference's speed" in each for each in cards
        )
        assert any("7 of 24 trials" in each and "best trial" in each for each in cards)
        assert not any("frame 0" in each for each in cards)
        choose = (
            "(each => {{ each.value = {1!r}; each.dispatchEvent(new Event({2!r})) }})(document.querySelector({0!r}))"
        )
        page.evaluate(choose.format(".filters select", "without a plan", "change"))
        page.until("document.querySelectorAll('.card').length === 3")
        page.evaluate(choose.format(".filters input", "nobody's", "input"))
        page.until("document.querySelector('.list').textContent === 'No search is like that.'")
        assert page.complaints == []


def test_what_ends_a_search_asks_first(shown):
    """Back, which has the focus, and Escape change nothing."""
    with Page(390, 844) as page:
        open_search(page, shown[0], "a ViT that runs")
        assert texts(page, ".phases li > :first-child") == ["reading the task", "trials"]
        assert texts(page, "[aria-current=step] > :first-child") == ["trials"]
        for answer in ("Back", "Cancel now"):
            page.evaluate(CLICK.format(where="section", words="Cancel now"))
            page.until("document.querySelector('dialog') !== null")
            assert page.evaluate("document.activeElement.textContent") == "Back"
            assert "It ends at once, without a plan." in texts(page, "dialog")[0]
            page.evaluate(CLICK.format(where="dialog", words=answer))
            page.until("document.querySelector('dialog') === null")
            assert answer != "Back" or texts(page, ".state") == ["running"]
        page.until("document.querySelector('.state.CANCELLING') !== null")
        assert page.complaints == []


def test_a_failed_search_goes_on_with_other_limits(shown):
    """They are asked for beside the button; what is left empty stays as it was."""
    read = "(() => { const asked = new XMLHttpRequest(); "
    read += "asked.open('GET', location.hash.replace('#/', '/v1/searches/'), false)"
    read += "; asked.send(); return JSON.parse(asked.responseText).spec; })()"
    with Page(390, 844) as page:
        page.ask("Page.navigate", url=shown[0])
        page.until("document.querySelector('.card .FAILED') !== null")
        page.evaluate("document.querySelector('.card .FAILED').parentElement.querySelector('a').click()")
        page.until("document.querySelectorAll('label input').length === 2")
        page.until("document.querySelector('figcaption').textContent === 'No trial was measured.'")
        assert page.evaluate("getComputedStyle(document.querySelector('svg')).display") == "none"
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        page.evaluate("document.querySelector('label input').value = '2h'")
        page.evaluate("[...document.querySelectorAll('button')].find(each => each.textContent === 'Go on').click()")
        page.until("document.querySelector('.state.QUEUED') !== null")
        assert page.evaluate(f"{read}.max_time") == "7200s"
        assert page.evaluate(f"{read}.trials") == 24
        assert page.complaints == []


FOCUSABLE = (
    "[...document.querySelectorAll('a[href], button, input, select, summary, [tabindex=\"0\"]')]"
    ".filter(each => each.checkVisibility({ visibilityProperty: true }) && each.getClientRects().length)"
)
REACHED = "window.reached = (window.reached ?? new Set()).add(document.activeElement), reached.size"


def nameless(page):
    """Roles of what can have the focus, or says something by a picture, and has no name."""
    nodes = page.ask("Accessibility.getFullAXTree")["nodes"]
    shown = [node for node in nodes if not node["ignored"] and node["role"]["value"] not in ("RootWebArea", "main")]
    found = []
    for node in shown:
        can_focus = any(each["name"] == "focusable" and each["value"]["value"] for each in node.get("properties", ()))
        role, name = node["role"]["value"], node.get("name", {}).get("value", "")
        if can_focus or role in ("image", "progressbar", "meter", "dialog"):
            found += [role] if not name.strip() or role in ("generic", "none") else []
    return found


def unreached(page):
    """What can have the focus, and never has it however often Tab is pressed."""
    page.evaluate(
        "document.activeElement.blur(), document.getElementById('main').blur(), window.reached = new Set(), 0"
    )
    for _ in range(page.evaluate(f"{FOCUSABLE}.length") + 5):
        page.press("Tab")
        page.evaluate(REACHED)
    return page.evaluate(f"{FOCUSABLE}.filter(each => !reached.has(each)).map(each => each.outerHTML.slice(0, 99))")


@pytest.mark.parametrize("name", [None, "gpt2-medium on one card", "train 161"], ids=["list", "plan", "failure"])
def test_a_screen_reader_has_a_role_and_a_name_for_every_control_and_the_keyboard_reaches_it(shown, name):
    """Of the list, of a search with a plan, with the box that it shows, and of one that failed."""
    url, _ = shown
    with Page(1280, 900) as page:
        page.ask("Page.navigate", url=url)
        page.until("document.querySelectorAll('.card').length === 6")
        if name is not None:
            page.evaluate(OPEN.format(name=name))
            page.until("document.querySelectorAll('tbody tr').length > 0")
            page.evaluate("[...document.querySelectorAll('details')].forEach(each => { each.open = true; })")
            page.until("[...document.querySelectorAll('.log')].every(each => each.textContent)")
        assert (nameless(page), unreached(page)) == ([], [])
        if name == "gpt2-medium on one card":
            page.evaluate("document.querySelector('td button').click()")
            page.until("document.querySelector('dialog')?.open")
            assert nameless(page) == []


def test_who_has_not_signed_in_has_named_controls(shown):
    url, _ = shown
    with Page(1280, 900) as page:
        page.ask("Page.navigate", url=url.partition("#")[0])
        page.until("!!document.querySelector('#token')")
        assert (nameless(page), unreached(page)) == ([], [])
