#!/usr/bin/env python3
"""An aitk extension (docs/extensions.md): trains a small model of captions with Python's standard library alone.

The model predicts the next character from the two before it: logits = first[a] + second[b] + bias, trained by stochastic
gradient descent on the cross-entropy. Results: model.safetensors and sample.txt.
"""

import json
import math
import os
import random
import select
import struct
import sys
import time

SCHEMA = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "steps": {"type": "integer", "minimum": 1, "maximum": 100000, "default": 2000},
        "batch_size": {"type": "integer", "minimum": 1, "maximum": 1024, "default": 32},
        "lr": {"type": "number", "minimum": 0, "maximum": 10, "default": 0.5},
        "sample_characters": {"type": "integer", "minimum": 0, "maximum": 10000, "default": 200},
    },
}


def send(**message):
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


# Without a buffer, so that `select` sees every message that was not read.
MESSAGES = open(0, "rb", buffering=0)


def receive():
    line = MESSAGES.readline()
    if not line:
        sys.exit("the attempt has ended")
    return json.loads(line)


def is_told_to_stop():
    """Whether a message waits. The only one after `start` is `stop`; a closed input means that the attempt has ended."""
    return bool(select.select([MESSAGES], [], [], 0)[0])


def read_captions(folder):
    names = sorted(name for name in os.listdir(folder) if name.endswith(".txt"))
    texts = []
    for name in names:
        with open(os.path.join(folder, name), encoding="utf-8") as file:
            texts.append(file.read().strip())
    if not texts:
        raise ValueError("the folder has no captions (*.txt)")
    return texts


def softmax(logits):
    largest = max(logits)
    exponents = [math.exp(value - largest) for value in logits]
    total = sum(exponents)
    return [value / total for value in exponents]


class Model:
    def __init__(self, size):
        self.first = [[0.0] * size for _ in range(size)]
        self.second = [[0.0] * size for _ in range(size)]
        self.bias = [0.0] * size

    def probabilities(self, a, b):
        return softmax([x + y + z for x, y, z in zip(self.first[a], self.second[b], self.bias)])

    def train(self, batch, lr):
        """One step of gradient descent. Returns the mean cross-entropy of the batch before it."""
        loss = 0.0
        gradients = []
        for a, b, target in batch:
            gradient = self.probabilities(a, b)
            loss -= math.log(max(gradient[target], 1e-12))
            gradient[target] -= 1.0
            gradients.append((a, b, gradient))
        rate = lr / len(batch)
        for a, b, gradient in gradients:
            for row in (self.first[a], self.second[b], self.bias):
                for index, value in enumerate(gradient):
                    row[index] -= rate * value
        return loss / len(batch)


def write_safetensors(path, tensors, metadata):
    """Writes rows of float32: the length of the header in 8 bytes, the header as JSON, then the data."""
    header, data = {"__metadata__": metadata}, bytearray()
    for name, rows in tensors.items():
        begin = len(data)
        for row in rows:
            data += struct.pack(f"<{len(row)}f", *row)
        header[name] = {"dtype": "F32", "shape": [len(rows), len(rows[0])], "data_offsets": [begin, len(data)]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + data)


def generate(model, characters, length, rng):
    a = b = 0
    text = []
    for _ in range(length):
        a, b = b, rng.choices(range(len(characters)), model.probabilities(a, b))[0]
        text.append(characters[b])
    return "".join(text)


def main():
    send(type="hello", version=1, name="char_model 1.0", config_schema=SCHEMA)
    start = receive()
    settings = {key: rule["default"] for key, rule in SCHEMA["properties"].items()}
    settings.update(start["config"])
    rng = random.Random(start["seed"])

    texts = read_captions(start["inputs"]["captions"])
    # Captions are joined by line feeds, which also stand for the begin.
    characters = ["\n"] + sorted(set("".join(texts)) - {"\n"})
    codes = {character: code for code, character in enumerate(characters)}
    stream = [codes[character] for character in "\n\n" + "\n".join(texts) + "\n"]
    send(type="log", level="info", message=f"{len(texts)} captions, {len(characters)} different characters")

    model, steps = Model(len(characters)), settings["steps"]
    stopped, reported = False, 0.0
    for step in range(1, steps + 1):
        places = [rng.randrange(2, len(stream)) for _ in range(settings["batch_size"])]
        loss = model.train([(stream[i - 2], stream[i - 1], stream[i]) for i in places], settings["lr"])
        # A step takes less than a millisecond: a message for each would be a flood.
        if step in (1, steps) or time.monotonic() > reported + 0.1:
            reported = time.monotonic()
            send(type="progress", step=step, total=steps, loss=loss)
        if step < steps and is_told_to_stop():
            stopped = True
            break

    tensors = {"first": model.first, "second": model.second, "bias": [model.bias]}
    write_safetensors(os.path.join(start["output"], "model.safetensors"), tensors, {"characters": "".join(characters)})
    send(type="artifact", path="model.safetensors")
    with open(os.path.join(start["output"], "sample.txt"), "w", encoding="utf-8") as file:
        file.write(generate(model, characters, settings["sample_characters"], rng).strip() + "\n")
    send(type="artifact", path="sample.txt")
    if not stopped:
        send(type="done")


if __name__ == "__main__":
    try:
        main()
    except (OSError, ValueError, KeyError) as error:
        send(type="error", message=f"{type(error).__name__}: {error}")
        sys.exit(1)
