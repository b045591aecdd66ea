//! The blocks of a U-Net, counted as `networks/lora.py` counts them (`get_block_index`), with diffusers' names.

/// A part of the names of a block's layers, the list in which the block's number is (down, middle, up), and the place in the list.
pub(super) type Placed = (String, usize, usize);

/// The layers of `count` blocks on one side. `attentions`: which of them have attentions.
fn side(
    (part, prefix): (usize, &str),
    count: usize,
    attentions: &[usize],
    convolutions: bool,
    place: impl Fn(usize, usize) -> usize,
) -> Vec<Placed> {
    let per_block = if part == 0 { 2 } else { 3 };
    let sampler = if part == 0 { "downsamplers" } else { "upsamplers" };
    let mut found = Vec::new();
    for block in 0..count {
        for layer in 0..per_block {
            let mut add =
                |kind: &str| found.push((format!("{prefix}.{block}.{kind}.{layer}."), part, place(block, layer)));
            if attentions.contains(&block) {
                add("attentions");
            }
            if convolutions {
                add("resnets");
            }
        }
        // The last block has none.
        if convolutions && block + 1 < count {
            found.push((format!("{prefix}.{block}.{sampler}.0."), part, place(block, 2)));
        }
    }
    found
}

const DOWN: (usize, &str) = (0, "down_blocks");
const UP: (usize, &str) = (2, "up_blocks");

/// Stable Diffusion 1 and 2: the first of the twelve places on the way down is that of the first convolution, which has no LoRA.
fn blocks_of_sd(convolutions: bool) -> Vec<Placed> {
    let mut found = side(DOWN, 4, &[0, 1, 2], convolutions, |block, layer| 1 + 3 * block + layer);
    found.push(("mid_block.".into(), 1, 0));
    found.extend(side(UP, 4, &[1, 2, 3], convolutions, |block, layer| 3 * block + layer));
    found
}

fn blocks_of_xl(convolutions: bool) -> Vec<Placed> {
    let mut found = side(DOWN, 3, &[1, 2], convolutions, |block, layer| 1 + 3 * block + layer);
    found.push(("mid_block.attentions.0.".into(), 1, 1));
    if convolutions {
        found.push(("mid_block.resnets.0.".into(), 1, 0));
        found.push(("mid_block.resnets.1.".into(), 1, 2));
    }
    found.extend(side(UP, 3, &[0, 1], convolutions, |block, layer| 3 * block + layer));
    found
}

/// The layers of the blocks. `convolutions`: those outside of attentions, too.
pub(super) fn unet_blocks(is_xl: bool, convolutions: bool) -> Vec<Placed> {
    match is_xl {
        true => blocks_of_xl(convolutions),
        false => blocks_of_sd(convolutions),
    }
}

/// The lengths of the three lists.
pub(super) const fn block_counts(is_xl: bool) -> [usize; 3] {
    if is_xl { [9, 3, 9] } else { [12, 1, 12] }
}
