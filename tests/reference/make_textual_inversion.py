"""Textual inversion by diffusers and transformers in float64 -> tests/fixtures/replay/textual_inversion.json.

`sd`: the job of make_replay.py trains the word `vorx` of three vectors instead of a LoRA: the loss of each step and the last vectors.
`prior`: the same with the prediction for the class instead of the noise (`prior_reg`). `sdxl`: the outputs and gradients of two text encoders for prompts
with a word. The table of a text encoder is extended by the vectors, so only these have gradients.

transformers pools at the largest id where a config has `eos_token_id` 2, which would be the word: the end token is set here.
"""
import json

import torch
from diffusers import DDPMScheduler, StableDiffusionPipeline, StableDiffusionXLPipeline
from make_replay import CAPTIONS, LR, OUT, SEED, STEPS, batches, draw, generator, latent, vae_fingerprint
from tiny_sd import TINY_SD
from tiny_sdxl import TINY_SDXL

WORD, VECTORS, INIT, CLASS = "vorx", 3, "a cat", "dog"
PROMPTS = ["a vorx on a table", "vorx_1 and Vorx.", "no word, here"]


class Extended(torch.nn.Module):
    """A table with trained vectors after it."""

    def __init__(self, table, vectors):
        super().__init__()
        self.table, self.vectors = table.weight.detach(), vectors

    def forward(self, ids):
        return torch.nn.functional.embedding(ids, torch.cat([self.table, self.vectors]))


class Encoder:
    def __init__(self, tokenizer, model):
        self.tokenizer, self.model = tokenizer, model
        inner = getattr(model, "text_model", model)
        table = inner.embeddings.token_embedding
        ids = tokenizer(INIT, add_special_tokens=False).input_ids[:VECTORS]
        ids += tokenizer("*", add_special_tokens=False).input_ids * (VECTORS - len(ids))
        self.vectors = torch.nn.Parameter(table.weight[ids].detach().clone())
        self.first = table.weight.shape[0]
        inner.embeddings.token_embedding = Extended(table, self.vectors)
        if hasattr(inner, "eos_token_id"):
            inner.eos_token_id = tokenizer.eos_token_id
        model.config.eos_token_id = tokenizer.eos_token_id
        model.requires_grad_(False)
        self.vectors.requires_grad_()

    def ids(self, prompt):
        """The word is cut out before the rest is split, as tokenizers do with added tokens."""
        out = []
        for at, part in enumerate(prompt.lower().split(WORD)):
            ids = range(self.first, self.first + VECTORS)
            if at and part.startswith("_1"):
                part, ids = part[2:], [self.first + 1]
            out += ([*ids] if at else []) + (self.tokenizer(part, add_special_tokens=False).input_ids if part else [])
        out = [self.tokenizer.bos_token_id, *out[:75], self.tokenizer.eos_token_id]
        return out + [self.tokenizer.pad_token_id] * (77 - len(out))

    def __call__(self, prompts, **options):
        return self.model(torch.tensor([self.ids(prompt) for prompt in prompts]), **options)


def train(prior=False):
    pipe = StableDiffusionPipeline.from_pretrained(TINY_SD, safety_checker=None)
    fingerprint = vae_fingerprint()
    made = [latent(path, pipe, fingerprint) for path in sorted((OUT / "data").glob("*.[jp][pn]g"))]
    keys, latents = [key for key, _ in made], [x.double() for _, x in made]
    pipe.unet.requires_grad_(False).double()
    encoder = Encoder(pipe.tokenizer, pipe.text_encoder.double())
    captions = [caption.replace("zorb", WORD) for caption in CAPTIONS]
    captions = [caption if WORD in caption else f"{WORD} {caption}" for caption in captions]
    optimizer = torch.optim.AdamW([encoder.vectors], lr=LR, eps=1e-6)
    alphas = DDPMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear").alphas_cumprod.double()
    groups, losses = batches(keys), []
    start = encoder.vectors.detach().clone()
    for step in range(STEPS):
        order = torch.randperm(len(groups), generator=generator(f"{SEED}/epoch/{step // len(groups)}/0"))
        items = groups[order[step % len(groups)]]
        t, noise, x = draw(generator(f"{SEED}/step/{step}/0"), torch.stack([latents[i] for i in items]))
        noise, a = noise.double(), alphas[t].view(-1, 1, 1, 1)
        context = encoder([captions[i] for i in items])[0]
        predict = lambda context: pipe.unet(a.sqrt() * x + (1 - a).sqrt() * noise, t, encoder_hidden_states=context).sample
        with torch.no_grad():
            target = predict(encoder([captions[i].replace(WORD, CLASS) for i in items])[0]) if prior else noise
        loss = ((predict(context) - target) ** 2).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_([encoder.vectors], 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, "start": start.flatten().tolist(), "vectors": encoder.vectors.flatten().tolist()}


def outputs():
    pipe = StableDiffusionXLPipeline.from_pretrained(TINY_SDXL)
    encoders = [Encoder(pipe.tokenizer, pipe.text_encoder.double()), Encoder(pipe.tokenizer_2, pipe.text_encoder_2.double())]
    out = [encoder(PROMPTS, output_hidden_states=True) for encoder in encoders]
    context = torch.cat([o.hidden_states[-2] for o in out], -1)
    pooled = out[1][0]
    weigh = lambda x: (x * torch.sin(torch.arange(x.numel()) * 0.7).view(x.shape)).sum()
    (weigh(context) + weigh(pooled)).backward()
    return {"prompts": PROMPTS, "context": context[:, ::9, ::7].flatten().tolist(), "pooled": pooled.flatten().tolist(),
            "gradients": [encoder.vectors.grad.flatten().tolist() for encoder in encoders]}


if __name__ == "__main__":
    report = {"word": WORD, "vectors": VECTORS, "init": INIT, "class": CLASS, "sd": train(), "prior": train(True), "sdxl": outputs()}
    (OUT / "textual_inversion.json").write_text(json.dumps(report))
    print("losses", report["sd"]["losses"], (OUT / "textual_inversion.json").stat().st_size, "bytes")
