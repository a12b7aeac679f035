"""The search of the built site, as its pages do it: lunr over mkdocs' index, by the options that mkdocs-material sets.

Terms are prefixes, of which one is enough; titles count a thousandfold; a field's length does not matter (b = 0);
sections are grouped under their page, which ranks by its best one.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

K1 = 1.2
STOP = {"a", "how", "i", "in", "my", "of", "on", "the", "to", "with"}  # of lunr's, those that the tests type


class SiteSearch:
    """An index to search.

    Args:
        site: Where mkdocs has built.
    """

    def __init__(self, site: Path) -> None:
        found = json.loads((site / "search" / "search_index.json").read_text())
        self._separator = re.compile(found["config"]["separator"])
        self._boosts = {name: options["boost"] for name, options in found["config"]["fields"].items()}
        self._sections = [section["location"] for section in found["docs"]]
        # Of each term: how often it stands in (number of the section, field).
        self._terms: dict[str, dict[tuple[int, str], int]] = {}
        for number, section in enumerate(found["docs"]):
            for field in self._boosts:
                for token in self._tokens(re.sub(r"<[^>]*>", "\n", section.get(field) or "")):
                    places = self._terms.setdefault(token, {})
                    places[number, field] = places.get((number, field), 0) + 1

    def _tokens(self, text: str) -> list[str]:
        return [token.lower() for line in text.split("\n") for token in self._separator.split(line) if token]

    def pages(self, words: str) -> list[str]:
        """Pages that are found, the best first, as paths of the site."""
        typed = [token for token in self._tokens(words) if token not in STOP]
        expanded = {term for term in self._terms if term.startswith(tuple(typed))}
        scores: dict[int, float] = {}
        matched: dict[int, set[str]] = {}
        for term in expanded:
            places = self._terms[term]
            rarity = math.log(1 + abs((len(self._sections) - len(places) + 0.5) / (len(places) + 0.5)))
            for (number, field), count in places.items():
                weight = self._boosts[field] * rarity * (K1 + 1) * count / (K1 + count)
                scores[number] = scores.get(number, 0.0) + weight / math.sqrt(len(expanded))
                matched.setdefault(number, set()).update(word for word in typed if term.startswith(word))
        best: dict[str, float] = {}
        for number, score in scores.items():
            page, _, anchor = self._sections[number].partition("#")
            share = (not anchor) + len(matched[number]) / len(set(typed))
            best[page] = max(best.get(page, 0.0), score * (1 + share**2))
        return sorted(best, key=best.__getitem__, reverse=True)
