"""The hundred prompts of the parity check: chat, code, CJK, emoji, and lengths from 1 to 2,000 tokens.

They are fixed: what is compared must not change with the machine or the Python version.
"""

# ruff: noqa: RUF001 - full-width punctuation belongs to the languages it is written in

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from paceline.client import Message


@dataclass(frozen=True)
class Case:
    """One prompt: a text, a conversation, or token ids."""

    kind: str
    prompt: str | list[Message] | list[int]
    max_tokens: int


QUESTIONS = (
    "What is the capital of France? Answer with one word.",
    "Name three primary colours.",
    "How many legs does a spider have?",
    "Write a haiku about the sea.",
    "Is 17 a prime number? Answer yes or no.",
    "Explain gravity to a child in one sentence.",
    "Translate 'good morning' into Spanish.",
    "What is 12 times 12?",
    "Give me a name for a black cat.",
    "Which planet is closest to the sun?",
    "Say hello.",
    "List the days of the week.",
    "Why is the sky blue?",
    "What does HTTP stand for?",
    "Who wrote Romeo and Juliet?",
    "Convert 100 degrees Celsius to Fahrenheit.",
    "What is the opposite of hot?",
)
SYSTEM = "You are terse. Answer in as few words as you can."
CODE = (
    "def fibonacci(n: int) -> int:\n    if n < 2:\n        return n\n    return",
    "class Stack:\n    def __init__(self):\n        self._items = []\n\n    def push(self, item):\n",
    'for (int i = 0; i < n; ++i) {\n    sum += a[i];\n}\nprintf("%d\\n",',
    "SELECT name, COUNT(*) AS orders\nFROM customers JOIN orders ON customers.id = orders.customer_id\nGROUP BY",
    "fn main() {\n    let numbers = vec![1, 2, 3];\n    let total: i32 = numbers.iter().",
    "import numpy as np\n\ndef softmax(x):\n    e = np.exp(x - x.max(-1, keepdims=True))\n    return",
    "<html>\n  <head>\n    <title>Home</title>\n  </head>\n  <body>\n    <h1>",
    '#!/bin/sh\nset -eu\nfor file in *.txt; do\n  mv -- "$file" "${file%.txt}',
    "const add = (a, b) => a + b;\nconst mul = (a, b) =>",
    '{"name": "paceline", "version": "0.1.0", "scripts": {"test": "',
    "try:\n    value = int(text)\nexcept ValueError as error:\n    raise",
)
CJK = (
    "今天天气很好，我们去公园",
    "人工智能是计算机科学的一个分支，它",
    "北京是中国的首都，上海是",
    "日本の首都は東京です。フランスの首都は",
    "吾輩は猫である。名前はまだ",
    "ありがとうございます。また明日、",
    "안녕하세요. 저는 학생입니다. 오늘은",
    "서울은 대한민국의 수도이며",
    "春眠不覺曉，處處聞啼鳥。夜來風雨聲，",
)
EMOJI = (
    "I love pizza 🍕 and ice cream 🍦 and",
    "👩\u200d👩\u200d👧\u200d👦 is a family. 🏳\ufe0f\u200d🌈 is a",
    "🚀🌕 To the moon! 🚀🚀",
    "Weather today: ☀\ufe0f 25°C, tomorrow: 🌧\ufe0f",
    "👍🏽👎🏿 skin tones matter; flags too: 🇩🇪🇯🇵",
    "😀😃😄😁😆 count these:",
    "🎉 Happy birthday 🎂! May all your wishes",
)
LENGTHS = (1, 2, 15, 16, 17, 33, 255, 512, 513, 1024, 1500, 2000)
LONG = 1000
"""Prompts of more tokens get a short answer: decoding is what takes the time."""


def cases(encode: Callable[[str], list[int]]) -> list[Case]:
    """All hundred. `encode` makes token ids of a text, for prompts of an exact length."""
    found = []
    for question in QUESTIONS:
        found.append(Case("chat", [Message("user", question)], 32))
        turns = [Message("user", "Hello!"), Message("assistant", "Hi. What can I do for you?")]
        found.append(Case("chat", [Message("system", SYSTEM), *turns, Message("user", question)], 32))
    for code in CODE:
        found += [Case("code", code, 20), Case("code", code[: len(code) // 2], 12)]
    for kind, texts in (("CJK", CJK), ("emoji", EMOJI)):
        for index, text in enumerate(texts):
            following = texts[(index + 1) % len(texts)]
            found += [Case(kind, text, 16), Case(kind, f"{text}\n{following}", 12)]
    prose = encode("\n\n".join((*QUESTIONS, *CODE, *CJK, *EMOJI)))
    for length in LENGTHS:
        tokens = (prose * (length // len(prose) + 1))[:length]
        found.append(Case(f"{length} tokens", tokens, 6 if length > LONG else 12))
    return found
