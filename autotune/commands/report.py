"""``autotune report``: what a search tried and found, as a page."""

from __future__ import annotations

import sys
from pathlib import Path

from ..errors import UserError
from ..files import check_output, write_text
from ..report.page import study_page
from ..report.printing import listened_to, print_json
from ..report.study import as_json
from ..searches.store.read_study import read_study, url_of
from ..searches.store.url import sqlite_files


def report(study: str, name: str | None, output: Path, json: bool) -> None:
    """Write a study's page and print its path, or one JSON document.

    Args:
        study: path or URL of the storage.
        name: the study's in there; None is the newest.
        output: where the page goes.
        json: print one JSON document.

    Raises:
        UserError: the page cannot be written; said before the study is read.
        StudyError: there is no such study, none of its trials has ended, or it is of another version.
    """
    url = url_of(study)
    check_output(output, sqlite_files(url), UserError)
    stored = read_study(url, name)
    write_text(output, study_page(stored), UserError)
    if json:
        print_json({"exit_code": 0, "path": str(output), **as_json(stored)})
    else:
        with listened_to(sys.stdout):
            print(output)
