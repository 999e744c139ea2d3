"""Varied texts for tests of everything that turns text into tokens and back."""

# ruff: noqa: RUF001 - look-alike characters are what these texts are for

from __future__ import annotations

import random
from typing import Final

FIXED: Final = (
    "Hello, world!",
    "  leading and trailing  ",
    "a\n\n\n b\t\tc \r\n d",
    "   1 2  3   45 6789, 3.14159 and 1e-10; ²³ ½ ٣ ৪ Ⅷ",
    "def f(x: int) -> str:\n    return f'{x:>10}'  # don't, we'll, I'm, they've, it'd\n",
    "for (int i = 0; i < n; ++i) { a[i] <<= 1; } // <html></html> <|not_a_token|>",
    "中文没有空格，日本語もそうです。한국어는 있습니다.",
    "مرحبا بالعالم، كيف حالك؟ שלום עולם",
    "👩\u200d👩\u200d👧\u200d👦 🏳\ufe0f\u200d🌈 👍🏽 🇩🇪 ☕\ufe0f e\u0301 (e + \u0301) A\u030a \u212b \u00c5",
    "Ｆｕｌｌ－ｗｉｄｔｈ １２３ ﬁ ﬂ \u00a0nbsp\u2003em\u200bzero\u2028line",
    "| a | b |\n|---|:-:|\n| \\| | `x` |\n\n- [ ] *todo*\n\n\n> \\*escaped\\* \\_\\_",
    "x" * 300 + " " * 40 + "\n" * 9 + "!?" * 20,
    "naïve façade œuvre Straße İstanbul ǅ",
    "\x00\x01\x7f control and \ufeff mark \ufffd",
)

_ALPHABETS: Final = (
    "abcdefghij klmnopqrstuvwxyz  ",
    "ABC abc 0123456789 .,;:-_/'\"",
    " \n\t\r\u00a0\u3000",
    "{}()[]<>|=+-*/&^%$#@!~`\\\n  ",
    "中文日本語かなカナ한국어。、",
    "مرحبا עולם ไทย हिन्दी",
    "👩👧👦🏳🌈👍🏽\u200d\ufe0f🇩🇪☕",
    "éàüßœ\u0301\u0308ﬁ½²Ⅷ٣",
    "'s't're've'm'll'd' ",
)


def varied_texts(count: int, *, seed: int = 0) -> list[str]:
    """`count` texts: the fixed ones, then random mixtures of scripts, code, white space, digits and emoji."""
    source = random.Random(seed)
    texts = list(FIXED[:count])
    while len(texts) < count:
        pieces = []
        for _ in range(source.randint(1, 6)):
            alphabet = source.choice(_ALPHABETS)
            pieces.append("".join(source.choices(alphabet, k=source.randint(1, 20))))
        texts.append("".join(pieces))
    return texts
