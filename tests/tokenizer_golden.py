#!/usr/bin/env python3
"""Writes golden token ids: one JSON array [text, ids...] a line, for 1,000 varied seeded texts.

pip install sentencepiece tokenizers==0.23.3
tests/tokenizer_golden.py sentencepiece FILE.model > tests/data/cpython-6m.jsonl
tests/tokenizer_golden.py byte-level tests/data/byte-level.json > tests/data/byte-level.jsonl

byte-level first trains a vocabulary with merges on the texts and writes it to the file that is named. The ids are those
of the pre-tokenizers gpt-2, smollm and llama-bpe, as the tokenizer.json files of those models define them.
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


def sentencepiece_encoders(path):
    import sentencepiece

    return [sentencepiece.SentencePieceProcessor(path).encode]


LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def byte_level_encoders(path):
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    smollm = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2])
    llama = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA3), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = llama
    trainer = trainers.BpeTrainer(
        vocab_size=1500, show_progress=False, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet())
    )
    trained.train_from_iterator(texts(), trainer)
    model = json.loads(trained.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"tokens": tokens, "merges": [" ".join(pair) for pair in model["merges"]]}, file, ensure_ascii=False)

    def encoder(pre_tokenizer, whole_first):
        merges = [tuple(pair) for pair in model["merges"]]
        tokenizer = Tokenizer(models.BPE(model["vocab"], merges, ignore_merges=whole_first))
        tokenizer.pre_tokenizer = pre_tokenizer
        return lambda text: tokenizer.encode(text).ids

    return [encoder(gpt2, False), encoder(smollm, False), encoder(llama, True)]


encoders = {"sentencepiece": sentencepiece_encoders, "byte-level": byte_level_encoders}[sys.argv[1]](sys.argv[2])
for text in texts():
    print(json.dumps([text] + [encode(text) for encode in encoders], ensure_ascii=False, separators=(",", ":")))
