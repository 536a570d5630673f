"""Change the repository's address in all files.

    python tools/set_address.py https://github.com/you/fork

_config.yml holds the address. Every other tracked text file may hold copies of its owner/name part
(install lines, links to Colab and Kaggle), and this rewrites them all.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ADDRESS = re.compile(r"https://github\.com/([\w.-]+/[\w.-]+?)(?:\.git)?/?")


def configured(root=ROOT):
    """The owner/name part of the address in _config.yml."""
    text = (root / "_config.yml").read_text()
    found = re.search(r"^  url: (\S+)$", text, re.MULTILINE)
    return ADDRESS.fullmatch(found.group(1)).group(1)


def files(root):
    """All tracked and new files that git does not ignore, without vendor/."""
    command = ["git", "-C", str(root), "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return [name for name in names if not name.startswith("vendor/")]


def rewrite(url, root=ROOT):
    """Rewrite every copy of the address below `root` and return the names of changed files."""
    match = ADDRESS.fullmatch(url)
    if not match:
        raise ValueError(f"not an address: {url!r} (wanted: https://github.com/owner/name)")
    old, new = configured(root), match.group(1)
    # Not inside a longer name: owner/name-2, or owner/name.org (but owner/name.git counts).
    pattern = re.compile(rf"(?<![\w.-]){re.escape(old)}(?![\w-])(?!\.(?!git\b)\w)")
    # Kaggle's links hold the address percent-encoded.
    quoted = re.compile(rf"(?<=%2F){re.escape(old.replace('/', '%2F'))}(?![\w.-])")
    changed = []
    for name in files(root):
        path = root / name
        try:
            with open(path, encoding="utf-8", newline="") as file:  # keeps line ends as they are
                text = file.read()
        except (UnicodeDecodeError, OSError):
            continue
        after = quoted.sub(new.replace("/", "%2F"), pattern.sub(new, text))
        if after != text:
            with open(path, "w", encoding="utf-8", newline="") as file:
                file.write(after)
            changed.append(name)
    return changed


if __name__ == "__main__":
    if len(sys.argv) != 2 or not sys.argv[1]:
        sys.exit("usage: make address URL=https://github.com/owner/name")
    try:
        done = rewrite(sys.argv[1])
    except ValueError as error:
        sys.exit(str(error))
    print(f"{len(done)} files changed" + "".join(f"\n  {name}" for name in done))
