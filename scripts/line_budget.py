"""Check that the engine stays small enough to be read: total lines, and lines per file.

The budget is on lines of code, as tinygrad counts its own: lines with something on them
besides comments and docstrings, so that explaining never costs anything. A file's length
counts every line, since that is what a reader scrolls through.

Run as ``python scripts/line_budget.py [ROOT]``; exit status 1 when over budget.
"""

from __future__ import annotations

import io
import sys
import token
import tokenize
from collections import Counter
from pathlib import Path

CHECKED = ("backend", "kernels", "integrations", "plugins")
# Not part of what runs a request: the command, the settings' and plugins' plumbing, the
# grammars and parsers that stand on the engine's public mechanism for masks, the cache of
# answers, which stands before the engine, and what a start remembers of the one before.
AROUND = (
    "backend/pagedllm/cli/",
    "backend/pagedllm/structured/",
    "backend/pagedllm/config.py",
    "backend/pagedllm/_",
    "backend/pagedllm/hookspecs.py",
    "backend/pagedllm/models/known.py",
    "backend/pagedllm/plugins.py",
    "backend/pagedllm/response_cache/",
    "backend/pagedllm/testing/",
)
# What some models or settings need besides what the engine runs on: weights in 8 and 4 bits,
# pages in 8, mixtures of experts, and the linear layers of the generic tier.
VARIANTS = (
    "backend/pagedllm/models/experts.py",
    "backend/pagedllm/models/linears.py",
    "backend/pagedllm/models/quantizing.py",
    "backend/pagedllm/worker/cache_dtype.py",
    "kernels/pagedllm_kernels/int8_pages.py",
    "kernels/pagedllm_kernels/quantized.py",
    "kernels/pagedllm_kernels/numba_cpu/experts.py",
    "kernels/pagedllm_kernels/numba_cpu/mixture.py",
    "kernels/pagedllm_kernels/numba_cpu/products.py",
    "kernels/pagedllm_kernels/numba_cpu/int8_pages.py",
    "kernels/pagedllm_kernels/numba_cpu/int8_programs.py",
    "kernels/pagedllm_kernels/numba_cpu/grouped.py",
    "kernels/pagedllm_kernels/numba_cpu/quantized.py",
)
# Pages outside the engine's memory, by a plugin's store.
STORED = ("backend/pagedllm/kv_store/",)
BUDGETS = {"engine": 9_000, "variants": 1_050, "stored": 300, "around": 5_100}
"""The engine and its kernels are whatever a request passes through."""
PER_FILE = 450
LAYOUT = {
    token.COMMENT,
    token.NL,
    token.NEWLINE,
    token.INDENT,
    token.DEDENT,
    token.ENCODING,
    token.ENDMARKER,
}


def code_lines(source: str) -> int:
    """Return the number of lines with code on them.

    A string that is a whole statement is a docstring, of whatever it follows.
    """
    lines: set[int] = set()
    starts_statement = True
    tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    for current, following in zip(tokens, [*tokens[1:], tokens[-1]], strict=True):
        if current.type in LAYOUT:
            starts_statement |= current.type in (token.NEWLINE, token.INDENT, token.DEDENT)
            continue
        alone = starts_statement and following.type in (token.NEWLINE, token.ENDMARKER)
        if not (current.type == token.STRING and alone):
            lines.update(range(current.start[0], current.end[0] + 1))
        starts_statement = False
    return len(lines)


def _part(name: str) -> str:
    """Say which budget a file of the engine or its kernels counts for."""
    if name.startswith(AROUND):
        return "around"
    if name.startswith(STORED):
        return "stored"
    return "variants" if name in VARIANTS else "engine"


def main(root: Path) -> int:
    """Print what is over budget, and the total; return the exit status."""
    code: Counter[str] = Counter()
    length: Counter[str] = Counter()
    problems = []
    for folder in CHECKED:
        for path in sorted((root / folder).rglob("*.py")):
            name = path.relative_to(root)
            if "tests" in name.parts:
                continue
            source = path.read_text("utf-8")
            lines = len(source.splitlines())
            code[folder] += code_lines(source)
            length[folder] += lines
            if folder in ("backend", "kernels"):
                code[_part(name.as_posix())] += code_lines(source)
            if lines > PER_FILE:
                problems.append(f"{name}: {lines} lines, at most {PER_FILE} are allowed")
    for part, budget in BUDGETS.items():
        if code[part] > budget:
            problems.append(f"{part}: {code[part]} lines of code, at most {budget} are allowed")
    for folder in CHECKED:
        print(f"{folder:12} {code[folder]:6} lines of code, {length[folder]:6} in all")
    print(*(f"{part:12} {code[part]:6} of {budget}" for part, budget in BUDGETS.items()), sep="\n")
    print(*problems, sep="\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1]))
