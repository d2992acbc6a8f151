#!/usr/bin/env python3
"""Writes golden token ids: one JSON array [text, [ids]] a line, for varied seeded texts.

    pip install sentencepiece && tests/tokenizer_golden.py sentencepiece FILE.model > tests/data/NAME.jsonl
    pip install tokenizers && tests/tokenizer_golden.py tokenizers tokenizer.json > tests/data/NAME.jsonl
"""

import json
import random
import sys

WORDS = """the of and def return self import for in while class None True lambda yield assert print range len naïve
café Straße señor 中文 日本語 한국어 русский Ελληνικά العربية עברית हिन्दी ไทย 😀 👩‍👩‍👧 e\u0301 ﬁ ½ ² Ⅷ ９ x86_64 0x1F 3.14159
1,000,000 don't I'll we've they'RE it's 'S http://example.org/a?b=c&d user@example.com C:\\dir --flag a+=b!=c <tag/>
{}[]() /* */ // # $x %d ^~` "quoted" snake_case CamelCase SCREAMING __init__""".split()
SPACES = [" ", " ", " ", " ", "  ", "   ", "    ", "\n", "\n\n", "\n    ", "\t", " \n", "\r\n", "\u00a0", "\u3000", ""]


def texts():
    random.seed(20)
    for _ in range(1000):
        kind = random.randrange(6)
        if kind == 0:
            yield "".join(chr(random.choice([random.randrange(32, 127), random.randrange(160, 0x3000)])) for _ in range(random.randrange(30)))
        elif kind == 1:
            yield random.choice(["", " ", "\n"]) * random.randrange(9) + str(random.randrange(10 ** random.randrange(1, 12)))
        else:
            n = random.randrange(1, 14)
            yield "".join(random.choice(SPACES[: 16 if kind < 4 else 5]) + random.choice(WORDS) for _ in range(n))


def encoder(kind, path):
    if kind == "sentencepiece":
        import sentencepiece

        model = sentencepiece.SentencePieceProcessor(path)
        return model.encode
    import tokenizers

    model = tokenizers.Tokenizer.from_file(path)
    return lambda text: model.encode(text, add_special_tokens=False).ids


encode = encoder(*sys.argv[1:])
for text in texts():
    print(json.dumps([text, encode(text)], ensure_ascii=False, separators=(",", ":")))
