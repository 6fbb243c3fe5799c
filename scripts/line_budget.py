"""Check that the engine stays small enough to be read: total lines, and lines per file.

Run as ``python scripts/line_budget.py [ROOT]``; exit status 1 when over budget.
"""

from __future__ import annotations

import sys
from pathlib import Path

BUDGETED = ("backend", "kernels")
CHECKED = (*BUDGETED, "integrations", "plugins")
TOTAL = 9_000
PER_FILE = 450


def count(path: Path) -> int:
    """Return the number of lines, blank ones and comments included."""
    return len(path.read_text("utf-8").splitlines())


def main(root: Path) -> int:
    """Print what is over budget, and the total; return the exit status."""
    sizes = {
        path: count(path)
        for folder in CHECKED
        for path in sorted((root / folder).rglob("*.py"))
        if "tests" not in path.relative_to(root).parts
    }
    total = sum(
        lines for path, lines in sizes.items() if path.relative_to(root).parts[0] in BUDGETED
    )
    problems = [
        f"{path.relative_to(root)}: {lines} lines, at most {PER_FILE} are allowed"
        for path, lines in sizes.items()
        if lines > PER_FILE
    ]
    if total > TOTAL:
        problems.append(f"{' and '.join(BUDGETED)}: {total} lines, at most {TOTAL} are allowed")
    print(*problems, f"{' + '.join(BUDGETED)}: {total} of {TOTAL} lines", sep="\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1]))
