"""LoRA training and full fine-tunes of Stable Diffusion 2.1 and XL by diffusers and peft -> tests/fixtures/train_{sd21,sdxl}/.

The format is that of make_train_lora.py and make_train_full.py, with these differences. There is one row of inputs for each step.
`parity_start` holds the initial LoRA of all layers that a variant trains, once for all variants. No file holds `alpha`: it is in
parity.json. For XL the inputs hold the time ids of each item: original height and width, top and left of the crop, target height and
width. full.safetensors holds each `every`th element of a tensor. The arithmetic is float64, so that only one side rounds.
"""
import copy
import json
import math

import torch
from diffusers import DDPMScheduler
from safetensors.torch import save_file

import tiny_sd
import tiny_sd21
import tiny_sdxl
from make_train_lora import BATCH, CAPTIONS, CONV, LINEAR, STEPS, TEXT
from peft import LoraConfig

RANK, ALPHA, EVERY = 2, 4, 31
ATTENTION = ["to_q", "to_k", "to_v", "to_out.0"]
ENCODERS = ["text_encoder", "text_encoder_2"]
PREFIXES = {"sd21": {"text_encoder": "lora_te"}, "sdxl": {"text_encoder": "lora_te1", "text_encoder_2": "lora_te2"}}

LORA_VARIANTS = {
    "sd21": {
        "adamw": {"targets": LINEAR},
        "attention": {"targets": ATTENTION},
        "conv": {"targets": CONV},
        "text_encoder": {"targets": LINEAR, "parts": ["text_encoder", "unet"], "max_norm": 0.05},
    },
    "sdxl": {
        "attention": {"targets": ATTENTION},
        "linear": {"targets": LINEAR},
        "conv": {"targets": CONV},
        "both_text_encoders": {"targets": LINEAR, "parts": ["text_encoder", "text_encoder_2", "unet"], "max_norm": 0.05},
    },
}
FULL_VARIANTS = {
    "sd21": {"unet": {}, "everything": {"parts": ["text_encoder", "unet"], "max_norm": 0.05}},
    "sdxl": {"unet": {}, "everything": {"parts": ["text_encoder", "text_encoder_2", "unet"], "max_norm": 0.05}},
}


class Family:
    def __init__(self, name):
        self.name = name
        module = {"sd21": tiny_sd21, "sdxl": tiny_sdxl}[name]
        pipe = module.build()
        self.folder = tiny_sd.FIXTURES / f"train_{name}"
        self.encoders = [part for part in ENCODERS if hasattr(pipe, part)]
        self.models = {part: getattr(pipe, part) for part in [*self.encoders, "unet"]}
        self.scheduler = DDPMScheduler.from_config(module.SCHEDULER)
        tokenizers = [pipe.tokenizer, getattr(pipe, "tokenizer_2", None)]
        options = {"padding": "max_length", "max_length": 77, "truncation": True, "return_tensors": "pt"}
        self.ids = {part: tok(CAPTIONS, **options).input_ids for part, tok in zip(self.encoders, tokenizers)}

    def inputs(self):
        g = torch.Generator().manual_seed(12)
        tensors = {
            "latents": torch.randn(STEPS, BATCH, 4, 8, 8, generator=g),
            "noise": torch.randn(STEPS, BATCH, 4, 8, 8, generator=g),
            "timesteps": torch.randint(0, 1000, (STEPS, BATCH), generator=g),
            "captions": torch.randint(0, len(CAPTIONS), (STEPS, BATCH), generator=g),
        }
        if self.name == "sdxl":
            ranges = [(64, 2048), (64, 2048), (0, 200), (0, 200), (512, 1536), (512, 1536)]
            columns = [torch.randint(low, high, (STEPS, BATCH), generator=g) for low, high in ranges]
            tensors["time_ids"] = torch.stack(columns, -1).float()
        return tensors

    def stem(self, part, path):
        """ai-toolkit's name of a layer. transformers 5 leaves out the `text_model.` level of CLIPTextModel."""
        if part == "unet":
            return "lora_unet_" + path.replace(".", "_")
        return f"{PREFIXES[self.name][part]}_text_model_" + path.removeprefix("text_model.").replace(".", "_")

    def loss(self, models, tensors, step):
        row = {key: value[step] for key, value in tensors.items()}
        x, noise, t = row["latents"].double(), row["noise"].double(), row["timesteps"]
        outs = [models[part](self.ids[part][row["captions"]], output_hidden_states=True) for part in self.encoders]
        if self.name == "sdxl":
            context = torch.cat([out.hidden_states[-2] for out in outs], -1)
            added = {"text_embeds": outs[1].text_embeds, "time_ids": row["time_ids"].double()}
        else:
            context, added = outs[0].last_hidden_state, None
        pred = models["unet"](self.scheduler.add_noise(x, noise, t), t, context, added_cond_kwargs=added).sample
        v = self.scheduler.config.prediction_type == "v_prediction"
        return torch.nn.functional.mse_loss(pred, self.scheduler.get_velocity(x, noise, t) if v else noise)

    def train(self, models, params, lr, max_norm, tensors):
        optimizer = torch.optim.AdamW(params, lr=lr, eps=1e-6)
        losses, norms = [], []
        for step in range(STEPS):
            loss = self.loss(models, tensors, step)
            loss.backward()
            norms.append(float(torch.nn.utils.clip_grad_norm_(params, max_norm or math.inf)))
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return {"losses": losses, "norms": norms}

    def with_lora(self, targets, parts):
        models = {part: copy.deepcopy(model).requires_grad_(False) for part, model in self.models.items()}
        layers = {}
        for part in parts:
            names = targets if part == "unet" else TEXT
            models[part].add_adapter(LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=names))
            models[part].double()
            for path, layer in models[part].named_modules():
                if getattr(layer, "lora_A", None):
                    layers[self.stem(part, path)] = layer
        return {part: model.double() for part, model in models.items()}, layers

    def start(self):
        """The initial LoRA as peft makes it, with the numbers of one generator in the order of the names."""
        _, layers = self.with_lora(CONV, [*self.encoders, "unet"])
        g = torch.Generator().manual_seed(13)
        out = {}
        for stem, layer in sorted(layers.items()):
            down, up = layer.lora_A["default"].weight, layer.lora_B["default"].weight
            bound = 1 / math.sqrt(down[0].numel())
            out[f"{stem}.lora_down.weight"] = (torch.rand(down.shape, generator=g) * 2 - 1) * bound
            out[f"{stem}.lora_up.weight"] = torch.zeros(up.shape)
        return out

    def train_lora(self, options, start, tensors):
        models, layers = self.with_lora(options["targets"], options.get("parts", ["unet"]))
        sides = [(f"{stem}.lora_{side}.weight", layer) for stem, layer in layers.items() for side in ("down", "up")]
        weights = {name: (layer.lora_A if ".lora_down." in name else layer.lora_B)["default"].weight for name, layer in sides}
        with torch.no_grad():
            for name, weight in weights.items():
                weight.copy_(start[name])
        done = self.train(models, list(weights.values()), 1e-3, options.get("max_norm"), tensors)
        final = {f"final/{name}": weight.detach().float().contiguous() for name, weight in weights.items()}
        return done | {"rank": RANK, "alpha": ALPHA, **options}, final

    def train_full(self, options, tensors):
        models = {part: copy.deepcopy(model).double().requires_grad_(False) for part, model in self.models.items()}
        trained = {}
        for part in options.get("parts", ["unet"]):
            for name, p in models[part].named_parameters():
                if part != "unet" and not name.startswith("text_projection"):
                    name = "text_model." + name.removeprefix("text_model.")
                trained[f"{part}.{name}"] = p.requires_grad_(True)
        done = self.train(models, list(trained.values()), 1e-4, options.get("max_norm"), tensors)
        return done | options, {name: p.detach().flatten()[::EVERY].float() for name, p in trained.items()}


def main():
    for name in ("sd21", "sdxl"):
        family = Family(name)
        family.folder.mkdir(parents=True, exist_ok=True)
        tensors, start = family.inputs(), family.start()
        save_file(tensors, family.folder / "parity_inputs.safetensors")
        save_file(start, family.folder / "parity_start.safetensors")
        report = {}
        for variant, options in LORA_VARIANTS[name].items():
            report[variant], final = family.train_lora(options, start, tensors)
            save_file(final, family.folder / f"parity_{variant}.safetensors")
            still = [key for key, value in final.items() if torch.equal(value, start[key.removeprefix("final/")])]
            print(name, variant, len(final), "tensors, without a gradient:", still)
        (family.folder / "parity.json").write_text(json.dumps({"captions": CAPTIONS, "variants": report}, indent=1))
        report, kept = {}, {}
        for variant, options in FULL_VARIANTS[name].items():
            report[variant], final = family.train_full(options, tensors)
            kept |= {f"{variant}/{key}": value for key, value in final.items()}
        save_file(kept, family.folder / "full.safetensors")
        (family.folder / "full.json").write_text(json.dumps({"captions": CAPTIONS, "every": EVERY, "variants": report}, indent=1))
        print(name, "full:", len(kept), "tensors")


if __name__ == "__main__":
    main()
