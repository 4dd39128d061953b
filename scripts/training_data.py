#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""JSON lines for `distillcache train` from a text of articles and a file of questions.

usage: training_data.py TEXT [QUESTIONS.jsonl] > data.jsonl

TEXT is a text in WikiText's form, where a line " = Title = " begins an article. Only the first half of its lines is used: the
second is the evaluation's. QUESTIONS has {"question", "answer"} a line (GSM8K's form); eight of them make one text, 60
texts. The order is random and always the same.
"""
import json
import random
import sys

LEAST = 2000  # characters of an article
TEXTS, QUESTIONS = 60, 8


def articles(lines):
    """Texts that begin with a title of the first level."""
    found, article = [], []
    for line in lines:
        if line.startswith(" = ") and not line.startswith(" = = "):
            if article:
                found.append("\n".join(article))
            article = []
        article.append(line)
    return found + ["\n".join(article)]


def question_texts(records):
    """Texts of questions with their answers."""
    for _ in range(TEXTS):
        some = random.sample(records, QUESTIONS)
        yield "\n\n".join(f"Question: {r['question']}\nAnswer: {r['answer']}" for r in some)


def main(text, questions=None):
    """Writes all texts to standard output."""
    with open(text, encoding="utf-8") as file:
        lines = file.read().split("\n")
    texts = [a for a in articles(lines[:len(lines) // 2]) if len(a) > LEAST]
    random.seed(1)
    if questions:
        with open(questions, encoding="utf-8") as file:
            texts += question_texts([json.loads(line) for line in file])
    random.shuffle(texts)
    for one in texts:
        print(json.dumps({"text": one}))


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    main(*sys.argv[1:])
