"""Share of the words that a small gpt writes after a short training on 1 MB of English that are words of the text.

    python tests/studies/written_words.py --ranks 2 --steps 1200

The text is Python's own documentation: its topics, and docstrings of the standard library in alphabetical order. A
written word counts if the text has it at least twice, as a whole word in small letters. First and last word of what is
written may be cut and are left out.
"""

import ast
import re
import subprocess
import sys
import sysconfig
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from collectives.cli.launcher import ProgramParser, at_least

SIZE = 1 << 20
"""Characters of the text."""

DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef


def documentation() -> Iterator[str]:
    """Texts in English of this Python installation."""
    from pydoc_data.topics import topics

    yield from topics.values()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("[a-z]*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            yield (isinstance(node, DOCUMENTED) and ast.get_docstring(node)) or ""


def words_in(text: str) -> list[str]:
    """Words of two letters or more, and a and I."""
    return [word for word in re.findall(r"[a-z]+", text.lower()) if len(word) > 1 or word in "ai"]


def main() -> int:
    parser = ProgramParser(__doc__)
    parser.add_argument("--ranks", type=at_least(1, int), default=2, metavar="N", help="ranks (default 2)")
    parser.add_argument("--steps", type=at_least(1, int), default=1200, metavar="N", help="steps (default 1200)")
    parser.add_argument("--model", default="gpt:mini", metavar="NAME", help="model (default gpt:mini)")
    parser.add_argument("--length", type=at_least(100, int), default=4000, metavar="N", help="bytes (default 4000)")
    options = parser.parse_args()
    text = "\n\n".join(filter(None, documentation()))[:SIZE]
    known = {word for word, times in Counter(words_in(text)).items() if times > 1}
    chorus = [sys.executable, "-m", "parallel.cli.main"]
    with TemporaryDirectory() as name:
        (data := Path(name, "text.txt")).write_text(text)
        checkpoint = ["--checkpoint", f"{name}/writer"]
        training = ["--data", data, "--model", options.model, "--steps", f"{options.steps}", *checkpoint]
        start = time.monotonic()
        subprocess.run([*chorus, "train", "-n", f"{options.ranks}", *training], check=True)
        seconds = time.monotonic() - start
        writing = ["--prompt", "The function ", "--length", f"{options.length}"]
        written = subprocess.run([*chorus, "generate", *checkpoint, *writing], check=True, capture_output=True).stdout
    words = words_in(written.decode(errors="replace"))[1:-1]
    share = sum(word in known for word in words) / len(words)
    print(written.decode(errors="replace")[:400])
    print(f"{len(text)} characters, {seconds:.0f} s of training")
    print(f"{len(words)} words written, of which {share:.0%} are in the text")
    return 0


if __name__ == "__main__":
    sys.exit(main())
