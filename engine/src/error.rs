//! What can go wrong in the engine.
