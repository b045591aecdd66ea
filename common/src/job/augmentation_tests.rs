//! Tests of the parameters of augmentations.

use super::*;
use serde_json::json;

fn kind(method: &str, params: Value) -> AugmentationKind {
    let read = read_augmentations(&[json!({"method": method, "params": params})]).unwrap();
    read.into_iter().next().unwrap().kind
}

/// The values that `repr` of albumentations 1.4.15 shows for these parameters.
#[test]
fn parameters_are_read_as_albumentations_reads_them() {
    let defaults: Vec<Value> = KNOWN.iter().map(|name| json!({"method": name})).collect();
    let read = read_augmentations(&defaults).unwrap();
    assert_eq!(read.len(), KNOWN.len());
    assert!(read.iter().all(|augmentation| augmentation.chance == 0.5));
    assert_eq!(read[3].kind, kind("ShiftScaleRotate", json!({})));
    let spatial = read.iter().filter(|augmentation| augmentation.kind.is_spatial());
    assert_eq!(spatial.count(), 4);
    assert_eq!(
        kind("RandomBrightnessContrast", json!({"brightness_limit": [0.1, 0.05]})),
        AugmentationKind::RandomBrightnessContrast {
            brightness: [0.05, 0.1],
            contrast: [-0.2, 0.2],
            by_max: true,
        }
    );
    assert_eq!(
        kind("HueSaturationValue", json!({"hue_shift_limit": 10})),
        AugmentationKind::HueSaturationValue {
            hue: [-10.0, 10.0],
            saturation: [-30.0, 30.0],
            value: [-20.0, 20.0],
        }
    );
    assert_eq!(
        kind("ColorJitter", json!({"brightness": 0.3, "saturation": 2, "hue": 0.1})),
        AugmentationKind::ColorJitter {
            brightness: [0.7, 1.3],
            contrast: [0.8, 1.2],
            saturation: [0.0, 3.0],
            hue: [-0.1, 0.1],
        }
    );
    let blur = |params| match kind("GaussianBlur", params) {
        AugmentationKind::GaussianBlur { size, sigma } => (size, sigma),
        other => panic!("{other:?}"),
    };
    assert_eq!(blur(json!({"blur_limit": 5})), ([3, 5], [0.0, 0.0]));
    assert_eq!(
        blur(json!({"blur_limit": [0, 0], "sigma_limit": [0.1, 2.0]})),
        ([0, 0], [0.1, 2.0])
    );
    assert_eq!(
        kind("CLAHE", json!({"clip_limit": 2, "tile_grid_size": [4, 8]})),
        AugmentationKind::Clahe {
            clip: [1.0, 2.0],
            tiles: [4, 8],
        }
    );
    assert_eq!(
        kind(
            "Rotate",
            json!({"limit": 15, "border_mode": "cv2.BORDER_CONSTANT", "value": [1, 2, 3]})
        ),
        AugmentationKind::Rotate {
            limit: [-15.0, 15.0],
            border: Border::Constant([1, 2, 3]),
        }
    );
    let certain = json!({"method": "ToGray", "params": {"always_apply": true}});
    assert_eq!(read_augmentations(&[certain]).unwrap()[0].chance, 1.0);
}

#[test]
fn mistakes_are_reported_with_their_key() {
    for (entry, key, part) in [
        (
            json!({"method": "ElasticTransform"}),
            "[0].method",
            "HorizontalFlip, VerticalFlip",
        ),
        (json!({"params": {}}), "[0]", "`method: NAME`"),
        (json!({"method": "ToGray", "p": 1}), "[0].p", "`params`"),
        (
            json!({"method": "ToGray", "params": {"p": 2}}),
            "[0].params.p",
            "from 0 to 1",
        ),
        (json!({"method": "ToGray", "params": [1]}), "[0].params", "by name"),
        (
            json!({"method": "GaussianBlur", "params": {"blur_limit": [3, 6]}}),
            "[0].params.blur_limit",
            "odd numbers of pixels up to 199, or 0, found 3 to 6",
        ),
        (
            json!({"method": "GaussianBlur", "params": {"blur_limit": 2}}),
            "[0].params.blur_limit",
            "found 0 to 2",
        ),
        (
            json!({"method": "Rotate", "params": {"value": 128.5}}),
            "[0].params.value",
            "a whole number from 0 to 255",
        ),
        (
            json!({"method": "RandomBrightnessContrast", "params": {"brightness": 0.1}}),
            "[0].params.brightness",
            "brightness_limit",
        ),
        (
            json!({"method": "Rotate", "params": {"border_mode": "cv2.BORDER_ODD"}}),
            "[0].params.border_mode",
            "cv2.BORDER_WRAP",
        ),
        (
            json!({"method": "CLAHE", "params": {"tile_grid_size": 8}}),
            "[0].params.tile_grid_size",
            "two numbers, [low, high], each from 1 to 64, found 8",
        ),
    ] {
        let mistakes = read_augmentations(&[entry]).unwrap_err();
        assert_eq!(mistakes.len(), 1, "{mistakes:?}");
        assert_eq!(mistakes[0].0, key);
        assert!(mistakes[0].1.contains(part), "{mistakes:?}");
    }
}
