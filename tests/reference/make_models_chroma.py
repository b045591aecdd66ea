"""Fixtures for the transformer of Chroma -> tests/fixtures/models/chroma.safetensors.

The weights are those of tiny_chroma. Latents before they are packed, the text and the probe are formulas of their names, too (see `case`),
so that only results are stored: the velocity `y`, and for some cases the gradients of <y, probe> for the latents, the text and every weight
with one dimension (`d.weights`). Timesteps are from 0 to 1000. `CASES` is repeated in engine/src/models/chroma/tests.rs.
"""

import torch
from make_models import save

import tiny_chroma
from formula_weights import formula
from tiny_flux import T5_WIDTH

# The shape of the latents, the places of the text, the tokens of each text, the timesteps.
CASES = {
    "square": ((1, 16, 4, 4), 9, [9], [700.0]),
    "wide": ((2, 16, 2, 6), 7, [6, 3], [1000.0, 31.25]),
    "shorter": ((1, 16, 6, 2), 11, [4], [0.5]),
}
WITH_GRADIENTS = ["wide"]
# Of the gradients of weights each `EVERY`th number is stored.
EVERY = 7


def case(model, name, shape, places, lengths, timesteps):
    latents = formula(f"{name}.latents", shape, 1.7).requires_grad_()
    context = formula(f"{name}.context", (shape[0], places, T5_WIDTH), 1.7).requires_grad_()
    y = tiny_chroma.predict(model, latents, torch.tensor(timesteps), context, tiny_chroma.text_mask(lengths, places))
    tensors = {f"{name}/y": y}
    if name in WITH_GRADIENTS:
        weights = {key: value for key, value in model.named_parameters() if value.dim() == 1}
        loss = (y * formula(f"{name}.probe", shape, 1.0)).sum()
        gradients = torch.autograd.grad(loss, [latents, context, *weights.values()])
        names = ["d.latents", "d.context", *(f"d.{key}" for key in weights)]
        tensors |= {f"{name}/{key}": value for key, value in zip(names, gradients)}
    return tensors


def main():
    model = tiny_chroma.transformer()
    tensors = {}
    for name, given in CASES.items():
        tensors |= case(model, name, *given)
    # One tensor for the gradients of all weights, in the order of their names: the header would be larger than the numbers.
    gradients = {key: value for key, value in sorted(tensors.items()) if key.startswith("wide/d.") and key.count(".") > 1}
    tensors = {key: value for key, value in tensors.items() if key not in gradients}
    tensors["wide/d.weights"] = torch.cat([value[::EVERY] for value in gradients.values()])
    save("chroma", tensors)
    print({key: (list(value.shape), round(float(value.detach().abs().max()), 4)) for key, value in tensors.items()})
    print(len(gradients), "weights with gradients, the smallest", min(float(value.abs().max()) for value in gradients.values()))


if __name__ == "__main__":
    main()
