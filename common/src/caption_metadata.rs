//! Metadata files of sd-scripts (`in_json`, `metadata_file`): a caption and tags for each image of a folder.

use serde_json::{Map, Value};
use std::collections::HashMap;
use std::path::Path;

/// Endings that are not part of an image's name.
const IMAGE_EXTENSIONS: [&str; 5] = ["png", "jpg", "jpeg", "webp", "bmp"];

/// What a metadata file says of an image.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ImageText {
    /// The path of the image, as the file has it: absolute, or below the folder of the images; with or without ending.
    pub path: String,
    caption: String,
    tags: String,
}

impl ImageText {
    /// Its caption: the tags follow the caption, or each of its lines if one is chosen at random (`wildcards`). An image without a caption
    /// has its tags as caption; sd-scripts drops them if lines are chosen.
    #[must_use]
    pub fn caption(&self, separator: &str, wildcards: bool) -> String {
        let (caption, tags) = (self.caption.as_str(), self.tags.as_str());
        if tags.is_empty() {
            return caption.to_owned();
        }
        if caption.is_empty() || wildcards && caption.trim().is_empty() {
            return tags.to_owned();
        }
        if !wildcards {
            return format!("{caption}{separator}{tags}");
        }
        let tags = tags.replace('\n', separator);
        let of_caption = caption.lines().filter(|line| !line.trim().is_empty());
        let lines: Vec<String> = of_caption.map(|line| format!("{line}{separator}{tags}")).collect();
        lines.join("\n")
    }
}

/// A metadata file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CaptionMetadata {
    /// In the order of the file.
    pub images: Vec<ImageText>,
    /// The places of the images with this file name without ending.
    by_name: HashMap<String, Vec<usize>>,
}

impl CaptionMetadata {
    /// Reads the text of a JSON file `{path: {"caption": …, "tags": …}}`, or of lines of JSON with an `image_path` each.
    ///
    /// # Errors
    /// The end of a sentence that begins with the name of the file.
    pub fn parse(text: &str, has_lines: bool) -> Result<Self, String> {
        let mut images = Vec::new();
        if has_lines {
            for (number, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
                let wrong = |what: &str| format!("line {}: {what}", number + 1);
                let value: Map<String, Value> =
                    serde_json::from_str(line).map_err(|error| wrong(&format!("expected a JSON object: {error}")))?;
                let path = value.get("image_path").and_then(Value::as_str);
                let path = path.ok_or_else(|| wrong("expected a text `image_path`"))?;
                images.push(image_text(path, &value).map_err(|what| wrong(&what))?);
            }
        } else {
            let map: Map<String, Value> = serde_json::from_str(text)
                .map_err(|error| format!("expected a JSON object with the paths of images: {error}"))?;
            for (path, entry) in &map {
                let shown: String = path.chars().take(100).collect();
                let wrong = |what: &str| format!("`{}`: {what}", shown.escape_debug());
                let Value::Object(entry) = entry else {
                    return Err(wrong("expected an object such as {\"caption\": \"a red circle\"}"));
                };
                images.push(image_text(path, entry).map_err(|what| wrong(&what))?);
            }
        }
        let mut by_name: HashMap<String, Vec<usize>> = HashMap::new();
        for (place, image) in images.iter().enumerate() {
            let path = normalized(&image.path);
            let name = without_ending(&path).rsplit('/').next().unwrap_or_default().to_owned();
            by_name.entry(name).or_default().push(place);
        }
        Ok(Self { images, by_name })
    }

    /// The place in [`Self::images`] of an image, by its path in the folder. A path of the file may have more folders before it.
    #[must_use]
    pub fn find(&self, relative: &Path) -> Option<usize> {
        let relative = normalized(relative.to_str()?);
        let name = without_ending(&relative).rsplit('/').next()?;
        let is_end = |path: &str, end: &str| {
            path.strip_suffix(end)
                .is_some_and(|before| before.is_empty() || before.ends_with('/'))
        };
        let places = self.by_name.get(name)?;
        let find = |has_ending: bool| {
            places.iter().copied().find(|place| {
                let path = normalized(&self.images[*place].path);
                let has = without_ending(&path).len() < path.len();
                has == has_ending && is_end(&path, if has { &relative } else { without_ending(&relative) })
            })
        };
        find(true).or_else(|| find(false))
    }
}

fn image_text(path: &str, entry: &Map<String, Value>) -> Result<ImageText, String> {
    let text = |key: &str| match entry.get(key) {
        None | Some(Value::Null) => Ok(String::new()),
        Some(Value::String(text)) => Ok(text.clone()),
        Some(_) => Err(format!("`{key}`: expected a text")),
    };
    Ok(ImageText {
        path: path.to_owned(),
        caption: text("caption")?,
        tags: text("tags")?,
    })
}

/// With `/` between folders.
fn normalized(path: &str) -> String {
    path.replace('\\', "/")
}

fn without_ending(path: &str) -> &str {
    match path.rsplit_once('.') {
        Some((stem, ending)) if IMAGE_EXTENSIONS.contains(&ending.to_lowercase().as_str()) => stem,
        _ => path,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn images_are_found_by_the_end_of_their_paths() {
        let text = r#"{"a": {"caption": "1"}, "C:\\set\\sub\\b.png": {"caption": "2"}, "/x/c.v2": {"caption": "3"}, "a.jpg": {"caption": "4"},
                       "b": {"caption": "5"}}"#;
        let metadata = CaptionMetadata::parse(text, false).unwrap();
        let found = |path: &str| Some(metadata.images[metadata.find(Path::new(path))?].caption(",", false));
        for (path, caption) in [
            ("a.png", Some("1")),
            ("a.jpg", Some("4")),
            ("sub/b.png", Some("2")),
            ("b.png", Some("2")),
            ("b.webp", Some("5")),
            ("c.v2.PNG", Some("3")),
            ("sub/a.png", None),
            ("xa.png", None),
            ("other/b.png", None),
        ] {
            assert_eq!(found(path).as_deref(), caption, "{path}");
        }
    }

    #[test]
    fn tags_follow_captions_as_in_sd_scripts() {
        let caption = |entry: &str, wildcards: bool| {
            let metadata = CaptionMetadata::parse(&format!("{{\"a\": {entry}}}"), false).unwrap();
            metadata.images[0].caption(",", wildcards)
        };
        assert_eq!(caption(r#"{"caption": "x", "tags": "p, q"}"#, false), "x,p, q");
        for wildcards in [false, true] {
            assert_eq!(caption(r#"{"tags": "p, q"}"#, wildcards), "p, q");
            assert_eq!(caption(r#"{"caption": "", "tags": "p\nq"}"#, wildcards), "p\nq");
        }
        assert_eq!(caption(r#"{"caption": "x", "tags": ""}"#, false), "x");
        assert_eq!(caption(r#"{"train_resolution": [512, 512]}"#, false), "");
        assert_eq!(
            caption(r#"{"caption": "x\n\ny", "tags": "p\nq"}"#, true),
            "x,p,q\ny,p,q"
        );
        let lines = "{\"image_path\": \"/a/b.jpg\", \"caption\": \"x\"}\n\n{\"image_path\": \"c\"}\n";
        let lines = CaptionMetadata::parse(lines, true).unwrap();
        assert_eq!(
            lines.images.iter().map(|image| image.path.as_str()).collect::<Vec<_>>(),
            ["/a/b.jpg", "c"]
        );
    }

    #[test]
    fn wrong_files_are_errors() {
        for (text, lines, expected) in [
            ("[]", false, "expected a JSON object"),
            ("{\"a\": 1}", false, "`a`: expected an object"),
            ("{\"a\": {\"caption\": 1}}", false, "`a`: `caption`: expected a text"),
            ("\n{}", true, "line 2: expected a text `image_path`"),
        ] {
            let error = CaptionMetadata::parse(text, lines).unwrap_err();
            assert!(error.starts_with(expected), "{error}");
        }
    }
}
