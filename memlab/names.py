"""Parse names of GPUs and models, and sizes, as people write them.

These are functions on text only. The catalogues are in `memlab.gpus` and `memlab.models`.
"""

import difflib
import math
import re
from collections.abc import Iterable

from memlab.units import MiB

# Words that do not tell one GPU from another. "rtx" counts after "titan": a TITAN RTX is a GPU of
# its own.
COMMON = re.compile(
    r"nvidia|geforce|tesla|(?<!titan.)rtx|gtx|sxm\d*|hbm\d*e?|generation|blackwell|gpu|colab|kaggle"
)
# A word of a GPU's name: a size in GB; "ti" before "super" or a number; a model such as A6000; a
# number; or any other word.
WORD = re.compile(
    r"(?P<gb>\d+) ?gb?(?![a-z])|ti(?=super|\d)|[a-z]{1,2}\d+(?:[a-z](?![a-z]))?(?!\d)"
    r"|(?P<number>\d+)|[a-z]+"
)
# Maker -> words in the names of its devices, which do not run CUDA.
OTHERS = {
    "AMD": re.compile(r"amd|radeon|instinct|rocm|rx|xtx?|mi\d{2,3}[a-z]?"),
    "Intel": re.compile(r"intel|arc|gaudi"),
    "Apple": re.compile(r"apple|mps|m\d"),
    "Google": re.compile(r"google|tpu"),
}
# Words for mobile and embedded chips, which share the number of a desktop GPU but not its memory.
ON_THE_MOVE = dict.fromkeys(("laptop", "mobile"), "laptop")
ON_THE_MOVE |= dict.fromkeys(("jetson", "orin", "xavier", "thor"), "Jetson")
SERIES = {"ada", "pro", "quadro", "titan"}  # with such a word, a number is another GPU
# Type of a rented machine -> the GPU in it, by the pages of AWS and Google Cloud.
MACHINES = {
    "p3": "V100",
    "p4d": "A100-40GB",
    "p4de": "A100-80GB",
    "p5": "H100",
    "p5e": "H200",
    "p5en": "H200",
    "p6-b200": "B200",
    "g4dn": "T4",
    "g5": "A10G",
    "g6": "L4",
    "g6e": "L40S",
    "a2-highgpu": "A100-40GB",
    "a2-ultragpu": "A100-80GB",
    "a3-highgpu": "H100",
    "a3-ultragpu": "H200",
    "g2-standard": "L4",
}
SEVERAL = re.compile(r"(?P<n>\d{1,3}) ?[x×*] ?(?P<one>.+)|(?P<it>.+?) ?[x×*:] ?(?P<m>\d{1,3})")
SIZE = re.compile(r"(?P<number>\d{1,3}(,\d{3})+(\.\d+)?|\d*\.?\d+) ?(?P<unit>gib|gb|mib|)", re.I)
LEAST_OF_BYTES = 1000  # a bare number below this is in GiB
LARGEST = 2**50  # bytes, 1 PiB: more than any GPU or machine has


def words_of(name: str) -> set[str]:
    """The words that identify a GPU, a size as "24gb".

    A bare number of at most three digits counts as a size: "A100-80" gives {"a100", "80gb"}.
    """
    words = set()
    for word in WORD.finditer(COMMON.sub(" ", name.lower())):
        gb = word["gb"] or (word["number"] if len(word["number"] or "1234") < 4 else None)
        words.add(f"{gb}gb" if gb else word[0])
    return words


def maker_without_cuda(words: set[str]) -> str | None:
    """The maker of `OTHERS` whose device these words name, or None."""
    return next((m for m, its in OTHERS.items() if any(map(its.fullmatch, words))), None)


def several(name: str) -> tuple[int, str] | None:
    """(count, name of the GPU) for "2x4090", "8 x H100", "T4x2", "A100:8"; None for one GPU."""
    match = SEVERAL.fullmatch(name.strip().lower())
    return match and (int(match["n"] or match["m"]), match["one"] or match["it"])


def in_machine(name: str) -> str | None:
    """The GPU in a rented machine such as "g5.xlarge" or "a2-highgpu-1g", or None."""
    return MACHINES.get(re.split(r"[._]|-\d+g$", name.strip().lower())[0])


def size_of(card: object) -> tuple[float, str] | None:
    """(number, unit) of a size: a number, or a text such as "11.5 GiB". None for anything else.

    The unit is "gib", "gb" or "bytes"; MiB are converted to bytes. A bare number below 1,000 is in
    GiB, a larger one in bytes.
    """
    number, unit = card, ""
    if isinstance(card, str):
        match = SIZE.fullmatch(card.strip())
        if not match:
            return None
        number, unit = float(match["number"].replace(",", "")), match["unit"].lower()
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        return None
    if not 0 < number < math.inf:
        return None
    if unit == "mib":
        return number * MiB, "bytes"
    return number, unit or ("gib" if number < LEAST_OF_BYTES else "bytes")


def like(words: set[str], name: str) -> bool:
    """Whether words may be a misspelling of a GPU's name: same series, same generation.

    The generation is the letters and the first digit of a name like A100, or the first two digits
    of a name like 4090. One digit may be missing.
    """
    others = words_of(name)
    (letters, digits), (its_letters, its_digits) = _number(words), _number(others)
    needed = 1 if letters else 2
    return (
        bool(digits)
        and (letters, digits[:needed]) == (its_letters, its_digits[:needed])
        and words & SERIES == others & SERIES
        and len(its_digits) - 1 <= len(digits) <= len(its_digits)
    )


def _number(words: set[str]) -> tuple[str, str]:
    """(letters, digits) of a GPU's model number, such as ("a", "100"); failing that, of a size."""
    for word in sorted(words, key=lambda word: word.endswith("gb")):
        if found := re.match(r"([a-z]{0,2})(\d+)", word):
            return found[1], found[2]
    return "", ""


# ---------------------------------------------------------------------- models

# Parts of a name that tell apart checkpoints of one architecture: the tuning, and a date such as
# -2507. Qwen's coders, and Meta's prefix, do not change the architecture either.
TUNED = re.compile(
    r"-(instruct|chat|it|pt|hf|think|thinking|sft|dpo|rl)\b|(?<=\db)-base\b|-base(?=-\d{4}$)"
    r"|-\d{4}$|^meta-(?=llama)|(?<=^qwen2\.5)-coder\b|(?<=^qwen3)-coder(?=-30b)"
)
ADDRESS = re.compile(r"(https?://)?(www\.)?(huggingface\.co|hf\.co)/(?P<name>[^/]+/[^/?#]+).*")
FOUR_BITS = re.compile(r"-(unsloth-)?bnb-4bit$")  # the suffix of unsloth's quantized checkpoints
SIZES = {"xsmall", "small", "base", "medium", "large", "xlarge", "xl", "xxl"}
# Words for another architecture, or another vocabulary, in the same family, generation and size.
KINDS = {"vl", "vision", "audio", "asr", "omni", "multimodal", "embedding", "reranker"}
KINDS |= {"mini", "micro", "nano", "flash", "air", "next", "h"}


def hub_name(text: str) -> str:
    """The owner/name in the address of a page on the hub; any other text unchanged."""
    match = ADDRESS.fullmatch(text)
    return match["name"] if match else text


def spelled(name: str) -> str:
    """A model's name in lower case with hyphens, without its owner and without `TUNED`.

    Ollama's spelling of a size, "qwen3:8b", becomes "qwen3-8b".
    """
    return TUNED.sub("", re.sub(r"[\s_:]+", "-", name.lower().split("/")[-1]))


def squeezed(name: str) -> str:
    """`spelled` without hyphens, so that "phi4" equals "phi-4" and "llama3-8b" "llama-3-8b"."""
    return spelled(name).replace("-", "")


def nearest_model(name: str, known: Iterable[str]) -> str | None:
    """The known name most similar to `name`, or None.

    Only names of the same family, generation and kind come into question. A size that `name` has
    must occur in the known name.
    """
    family, version, kinds, sizes = _parts(name)

    def may_be(other: str) -> bool:
        its_family, its_version, its_kinds, its_sizes = _parts(other)
        kin = difflib.SequenceMatcher(None, family, its_family).ratio() >= 0.8
        same = version == its_version and kinds == its_kinds
        tiny = name.endswith("-tiny") == other.endswith("-tiny")
        return kin and same and tiny and sizes <= its_sizes

    alike = {spelled(other): other for other in filter(may_be, known)}
    near = difflib.get_close_matches(spelled(name), alike, 1)
    return alike[near[0]] if near else None


def _parts(name: str) -> tuple[str, str | None, set[str], set[str]]:
    """(family, generation, kinds, sizes) of a name.

    "qwen3-embedding-0.6b" gives ("qwen", "3", {"embedding"}, {"0.6b"}).
    """
    # A hyphen between the family and its generation: "qwen3" is split into "qwen" and "3".
    family, *words = re.sub(r"^([a-z]+)(?=\d)", r"\1-", spelled(name)).split("-")
    version = words[0] if words and re.fullmatch(r"v?\d+(\.\d+)?", words[0]) else None
    return (
        family,
        version,
        KINDS.intersection(words),
        SIZES.intersection(words) | {w for w in words if re.search(r"\d[bm]$", w)},
    )
