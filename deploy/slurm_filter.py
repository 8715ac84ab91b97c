"""A submit filter for Slurm: asks a service on which types of cards a job fits, and writes that into its script.

    python slurm_filter.py --cards h100,l40s job.sh | sbatch

The script says what it trains: `#AUTOTUNE fingerprint=sha256:… budget=20GiB`, as its plan has it. Nodes have their
cards' names as features (`Feature=h100` in slurm.conf). A script without such a line, or one that nothing is known of,
goes through as it is, with a word on stderr.
"""

from __future__ import annotations

import argparse
import math
import re
import sys

from placement import NoAnswer, ask, words


def filtered(script: str, cards: list[str]) -> tuple[str, str]:
    """The script, with a constraint on nodes, and with its memory where that was measured and none is asked for; and
    what to say."""
    line = re.search(r"^#AUTOTUNE\s+(.*)$", script, re.MULTILINE)
    if line is None:
        return script, ""
    asked = dict(word.partition("=")[::2] for word in line[1].split())
    try:
        rows = ask(asked.get("fingerprint", ""), cards, asked.get("budget"))
    except NoAnswer as reason:
        return script, str(reason)
    said = "autotune: " + "; ".join(map(words, rows))
    fitting = [row for row in rows if row["fits"]]
    if not fitting:
        return script, said
    added = [f"#SBATCH --constraint={'|'.join(row['card'] for row in fitting)}"]
    hosts = [row["host_bytes"] for row in fitting if row["host_bytes"]]
    if hosts and not re.search(r"^#SBATCH\s+--mem", script, re.MULTILINE):
        added.append(f"#SBATCH --mem={math.ceil(1.03 * max(hosts) / 2**20)}M")
    first, _, rest = script.partition("\n")
    return "\n".join([first, *added, rest]), said


def main() -> None:
    """From a file to stdout."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("script", type=argparse.FileType())
    parser.add_argument("--cards", required=True, help="that the cluster has, as `autotune estimate --card` calls them")
    arguments = parser.parse_args()
    script, said = filtered(arguments.script.read(), arguments.cards.split(","))
    sys.stdout.write(script)
    if said:
        print(said, file=sys.stderr)


if __name__ == "__main__":
    main()
