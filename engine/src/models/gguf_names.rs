//! The names of tensors of language models in GGUF files, which are those of llama.cpp.

use crate::weights::Index;

/// How llama.cpp names the tensors of a model, and how transformers does.
pub(super) struct GgufNames {
    /// What stands before the number of a block in a file, and in transformers.
    pub(super) blocks: (&'static str, &'static str),
    /// The tensors of a block, without `.weight`.
    pub(super) in_block: &'static [(&'static str, &'static str)],
    /// The tensors outside of the blocks.
    pub(super) outside: &'static [(&'static str, &'static str)],
}

impl GgufNames {
    /// The tensors under the names of transformers. Those that have them already, and unknown ones, keep their names.
    pub(super) fn with_transformers_names(&self, index: Index) -> Index {
        if !index.tensors().any(|(name, _)| name.starts_with(self.blocks.0)) {
            return index;
        }
        index.renamed(|name, shape| {
            let name = self.renamed(name).unwrap_or_else(|| name.to_owned());
            Some((name, shape.to_vec()))
        })
    }

    /// The name in GGUF files of a tensor of transformers; `None` if it is not known.
    pub(super) fn gguf_name(&self, name: &str) -> Option<String> {
        if let Some((gguf, _)) = self.outside.iter().find(|(_, outside)| *outside == name) {
            return Some((*gguf).to_owned());
        }
        let (in_file, in_transformers) = self.blocks;
        let (number, inner) = name.strip_prefix(in_transformers)?.split_once('.')?;
        let (layer, kind) = inner.rsplit_once('.')?;
        let (layer, _) = self.in_block.iter().find(|(_, known)| *known == layer)?;
        Some(format!("{in_file}{number}.{layer}.{kind}"))
    }

    /// The name in transformers; `None` if it is not known.
    pub(super) fn renamed(&self, name: &str) -> Option<String> {
        if let Some((_, outside)) = self.outside.iter().find(|(gguf, _)| *gguf == name) {
            return Some((*outside).to_owned());
        }
        let (in_file, in_transformers) = self.blocks;
        let (number, inner) = name.strip_prefix(in_file)?.split_once('.')?;
        let (layer, kind) = inner.rsplit_once('.')?;
        let (_, layer) = self.in_block.iter().find(|(gguf, _)| *gguf == layer)?;
        Some(format!("{in_transformers}{number}.{layer}.{kind}"))
    }
}
