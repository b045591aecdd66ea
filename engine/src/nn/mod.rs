//! Layers and operations with their backward passes.
