"""Loads whole models that the engine saved with diffusers, and compares every tensor with the base model's.

    AITK_KEEP_SAVES=FOLDER cargo test -p aitk-engine --lib a_folder_is_saved
    python tests/reference/check_saves.py FOLDER

Of each base model there is `folder` (diffusers) and, where its layout allows, `file.safetensors` (the first release's). The
test changed `x` to `x / 2 + (its place % 100) / 1000` in some tensors; all others are the base's.
"""
