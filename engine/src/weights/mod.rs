//! Reading model weights.
