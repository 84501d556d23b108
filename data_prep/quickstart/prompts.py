"""The quickstart's prompts: written for this project, generated the same way every time from templates/.

usage: python data_prep/quickstart/prompts.py > prompts.jsonl
       (one {"id", "domain", "split", "prompt"} a line)

A template file is a list of kinds (`# kind`), one template a line. What a template may contain:
  [a|b|c]       one of the options, which may contain anything below or nothing; nested brackets are fine
  <word>        a word of the list `word` of templates/words.txt; <word2>, <word3>: further, different ones
  <x:a|b>       one of the options; <x> repeats it
  <n:3-9>       a whole number; <n:20-80/5> in steps of 5; <n> repeats it
  <=a*b+2>      a sum of products of numbers bound before
  {n:3-9}       binds like <n:3-9> and prints nothing
  <he> <his> <him>   pronouns of <name> (capitalised: <He> <His>)
  « »           square brackets of the text itself; ¶ is a line break
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

TEMPLATES = Path(__file__).resolve().parent / "templates"
COUNTS = {"math": 1700, "code": 1480, "chat": 600, "instruction": 520}  # prompts per domain
SEED = 20
MAX_WORDS = 75
ATTEMPTS = 12  # draws of one template before it is taken to be exhausted
PER_TEMPLATE = 48  # most prompts that one template gives
FRAME_SHARE = 0.4  # share of prompts with an opening, and with a closing, where the domain has some
NEAR_DUPLICATE = 0.6  # highest Jaccard similarity of word 5-grams, names and numbers masked

WordLists = Mapping[str, Sequence[str]]

PRONOUNS = {"she": ("her", "her"), "he": ("his", "him")}
ESCAPES = str.maketrans({"«": "[", "»": "]", "¶": "\n"})
SLOT = re.compile(r"<([^<>]+)>")
SILENT = re.compile(r"\{\w+:[^{}]+\}")
DEFINITION = re.compile(r"[<{](\w+:[^<>{}]+)[>}]")
OPTIONS = re.compile(r"\[([^\[\]]*)\]")
NUMBER_RANGE = re.compile(r"(\d+)-(\d+)(?:/(\d+))?")


@dataclass(frozen=True)
class Prompt:
    """One user prompt; `id` is a hash of domain and text, and the split follows from the id alone."""

    domain: str
    text: str

    @property
    def id(self) -> str:
        """12 hexadecimal digits."""
        return hashlib.sha256(f"{self.domain}\n{self.text}".encode()).hexdigest()[:12]

    @property
    def split(self) -> str:
        """train, calibration, validation or test."""
        return split_of(self.id)


def split_of(prompt_id: str) -> str:
    """7.2 % calibration, 3.6 % validation, 3.6 % test, the rest train, by the id's last six digits modulo 1000."""
    bucket = int(prompt_id[-6:], 16) % 1000
    if bucket < 72:
        return "calibration"
    return "validation" if bucket < 108 else "test" if bucket < 144 else "train"


@dataclass(frozen=True)
class Frames:
    """What may stand before and after a domain's prompts."""

    openings: tuple[str, ...]
    closings: tuple[str, ...]


def read_words() -> dict[str, list[str]]:
    """The word lists of templates/words.txt."""
    lines = (TEMPLATES / "words.txt").read_text(encoding="utf-8").splitlines()
    return {
        key: words.strip().split("|") for key, _, words in (line.partition(":") for line in lines if line)
    }


def read_templates(domain: str) -> tuple[dict[str, list[str]], Frames]:
    """Kind → templates, in the order of the file; the lines of the kinds `opening` and `closing` apart."""
    kinds: dict[str, list[str]] = defaultdict(list)
    kind = ""
    for line in (TEMPLATES / f"{domain}.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("# "):
            kind = line[2:]
        elif line:
            kinds[kind].append(line)
    frames = Frames(tuple(kinds.pop("opening", ())), tuple(kinds.pop("closing", ())))
    return dict(kinds), frames


class Filling:
    """One draw: remembers what every slot of a template was bound to."""

    def __init__(self, rng: random.Random, words: WordLists) -> None:
        self.rng = rng
        self.words = words
        self.bound: dict[str, str] = {}

    def expand(self, template: str) -> str:
        """The template with every choice made. Raises KeyError for a slot that nothing defines."""
        text = template
        while match := OPTIONS.search(text):  # innermost brackets first
            text = text[: match.start()] + self.rng.choice(match[1].split("|")) + text[match.end() :]
        for definition in DEFINITION.findall(text):  # bound first: a sum may stand before what it adds up
            self.slot(definition)
        text = SLOT.sub(lambda m: self.slot(m[1]), SILENT.sub("", text)).translate(ESCAPES)
        text = re.sub(r"\b([Aa]) (?=[aeiou])(?!uni|us|one|eu)", r"\1n ", text)
        text = re.sub(r"\b([Aa])n (?=[b-df-hj-np-tv-z])(?!hour|hon)", r"\1 ", text)
        text = re.sub(r" +([.,?](?:\s|$))", r"\1", text)
        return re.sub(r"(?<=\S) {2,}", " ", text).strip()

    def slot(self, slot: str) -> str:
        """The text of one slot, bound at its first use."""
        if slot.startswith("="):
            return str(self.sum_of_products(slot[1:]))
        key, _, definition = slot.partition(":")
        if key in self.bound:
            return self.bound[key]
        if definition:
            self.bound[key] = self.draw(definition)
        elif key.lower() in ("he", "his", "him"):
            return self.pronoun(key)
        else:
            self.bound[key] = self.word(key)
        return self.bound[key]

    def draw(self, definition: str) -> str:
        """A number of a range or one of several options."""
        if match := NUMBER_RANGE.fullmatch(definition):
            low, high, step = int(match[1]), int(match[2]), int(match[3] or 1)
            return str(self.rng.randrange(low, high + 1, step))
        return self.rng.choice(definition.split("|"))

    def word(self, key: str) -> str:
        """A word of the list `key` names that no other slot of the same list holds."""
        base = key.rstrip("0123456789")
        taken = {value for other, value in self.bound.items() if other.rstrip("0123456789") == base}
        word = self.rng.choice([w for w in self.words[base] if w.split("/")[0] not in taken])
        if base == "name":
            word, pronoun = word.split("/")
            self.bound[f"pronoun of {key}"] = pronoun
        return word

    def pronoun(self, key: str) -> str:
        """he/his/him of <name>."""
        subject = self.bound["pronoun of name"]
        possessive, object_form = PRONOUNS[subject]
        text = {"he": subject, "his": possessive, "him": object_form}[key.lower()]
        return text.capitalize() if key[0].isupper() else text

    def sum_of_products(self, expression: str) -> int:
        """`a*b+2-c` over bound numbers."""
        total = 0
        for sign, term in re.findall(r"([+-]?)([^+-]+)", expression):
            product = 1
            for factor in term.split("*"):
                product *= int(self.bound.get(factor, factor))
            total += -product if sign == "-" else product
        return total


def masked_ngrams(text: str, names: frozenset[str], size: int = 5) -> frozenset[tuple[str, ...]]:
    """Word n-grams with every number and every name replaced by a placeholder."""
    tokens = ["#" if t.isdigit() else "@" if t in names else t.lower() for t in re.findall(r"\w+", text)]
    count = max(1, len(tokens) - size + 1)
    return frozenset(tuple(tokens[i : i + size]) for i in range(count))


class Seen:
    """Accepted prompts, indexed by n-gram, so that a near duplicate is found without comparing all pairs."""

    def __init__(self, names: frozenset[str]) -> None:
        self.names = names
        self.grams: list[frozenset[tuple[str, ...]]] = []
        self.index: dict[tuple[str, ...], list[int]] = defaultdict(list)

    def accept(self, text: str) -> bool:
        """Add the text and say True, unless an accepted one is too similar."""
        grams = masked_ngrams(text, self.names)
        shared: dict[int, int] = defaultdict(int)
        for gram in grams:
            for other in self.index.get(gram, ()):
                shared[other] += 1
        for other, common in shared.items():
            if common / (len(grams) + len(self.grams[other]) - common) > NEAR_DUPLICATE:
                return False
        for gram in grams:
            self.index[gram].append(len(self.grams))
        self.grams.append(grams)
        return True


def draws(domain: str, template: str, number: int, frames: Frames, words: WordLists) -> Iterator[str]:
    """Candidate texts of one template. Every draw has a seed of its own, so one template's texts do not
    depend on the others."""
    for attempt in range(ATTEMPTS):
        rng = random.Random(f"{SEED}:{domain}:{template}:{number}:{attempt}")
        text = Filling(rng, words).expand(template)
        if frames.openings and rng.random() < FRAME_SHARE:
            text = f"{rng.choice(frames.openings)} {text}"
        if frames.closings and rng.random() < FRAME_SHARE:
            text = f"{text} {rng.choice(frames.closings)}"
        if len(text.split()) <= MAX_WORDS:
            yield text


def generate_domain(domain: str, count: int, words: WordLists, seen: Seen) -> list[Prompt]:
    """`count` prompts of one domain: round by round, the first new text of each template. Raises RuntimeError
    when the templates cannot give that many."""
    kinds, frames = read_templates(domain)
    prompts: list[Prompt] = []
    for number in range(PER_TEMPLATE):
        for template in chain.from_iterable(kinds.values()):
            text = next(filter(seen.accept, draws(domain, template, number, frames, words)), None)
            if text is not None:
                prompts.append(Prompt(domain, text))
            if len(prompts) == count:
                return prompts
    raise RuntimeError(f"templates/{domain}.txt is exhausted after {len(prompts)} of {count} prompts")


def generate_prompts(counts: Mapping[str, int] = COUNTS) -> list[Prompt]:
    """All prompts, the domains interleaved in proportion to their counts."""
    words = read_words()
    seen = Seen(frozenset(name.split("/")[0] for name in words["name"]))
    placed = [
        ((position + 0.5) / count, prompt)
        for domain, count in counts.items()
        for position, prompt in enumerate(generate_domain(domain, count, words, seen))
    ]
    return [prompt for _, prompt in sorted(placed, key=lambda item: item[0])]


def main() -> None:
    """Print every prompt as one JSON line."""
    for prompt in generate_prompts():
        row = {"id": prompt.id, "domain": prompt.domain, "split": prompt.split, "prompt": prompt.text}
        print(json.dumps(row, ensure_ascii=False))


if __name__ == "__main__":
    main()
