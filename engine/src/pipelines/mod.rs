//! Text-to-image and image-to-image.
