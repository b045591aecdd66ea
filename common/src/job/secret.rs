//! Recognises variables and texts that are secrets.

/// A variable whose name has one of these words is a secret, whatever its value.
const SECRET_WORDS: &[&str] = &[
    "PASSWORD",
    "PASSWD",
    "PASSPHRASE",
    "SECRET",
    "CREDENTIAL",
    "CREDENTIALS",
];
/// A variable whose name has one of these words is a secret if its value looks generated: a LoRA's trigger word is also called
/// a token.
const TOKEN_WORDS: &[&str] = &["TOKEN", "APIKEY", "AUTH"];
/// Words before `_KEY` or `_KEYS` that make it a secret, also where more words follow.
const KEY_QUALIFIERS: &[&str] = &["API", "ACCESS", "PRIVATE", "SECRET", "AUTH", "ACCOUNT", "STORAGE"];
/// What the connection strings of Azure have before their keys, in lower case.
const KEY_FIELDS: &[&str] = &["accountkey=", "sharedaccesskey="];
/// Prefixes of the tokens of Hugging Face, GitHub, GitLab, OpenAI, Slack, Google, AWS, and of JSON web tokens.
const TOKEN_PREFIXES: &[&str] = &[
    "hf_",
    "api_org_",
    "ghp_",
    "gho_",
    "github_pat_",
    "glpat-",
    "sk-",
    "xoxb-",
    "xoxp-",
    "AIza",
    "AKIA",
    "ASIA",
    "eyJ",
];
/// The minimum length of a generated token.
const MIN_TOKEN_BYTES: usize = 16;

/// Whether the value of a variable is a secret that must not be stored, judged by the variable's name and the form of the value.
#[must_use]
pub(super) fn is_secret(name: &str, value: &str) -> bool {
    let value = value.trim();
    if value.is_empty() {
        return false;
    }
    let lower = value.to_ascii_lowercase();
    if looks_like_token(value) || KEY_FIELDS.iter().any(|field| lower.contains(field)) {
        return true;
    }
    let generated = value.len() >= MIN_TOKEN_BYTES
        && value.bytes().all(|byte| byte.is_ascii_graphic())
        && !value.starts_with(['/', '.', '~']);
    let name = name.to_ascii_uppercase();
    let words: Vec<&str> = name.split(['_', '-', '.']).filter(|word| !word.is_empty()).collect();
    let ends = |list: &[&str]| words.iter().any(|word| list.iter().any(|end| word.ends_with(end)));
    let pairs = || {
        words
            .windows(2)
            .filter_map(|pair| Some((*pair.first()?, *pair.get(1)?)))
    };
    let key = pairs().any(|(word, next)| matches!(next, "KEY" | "KEYS") && KEY_QUALIFIERS.contains(&word));
    // It has a password or a key.
    let connection = pairs().any(|pair| pair == ("CONNECTION", "STRING"));
    ends(SECRET_WORDS) || connection || (generated && (ends(TOKEN_WORDS) || key))
}

/// Whether a text has the form of a well-known kind of token.
#[must_use]
pub(super) fn looks_like_token(text: &str) -> bool {
    let Some(rest) = TOKEN_PREFIXES.iter().find_map(|prefix| text.strip_prefix(prefix)) else {
        return false;
    };
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    // Words of ordinary names are shorter than runs of a generated token.
    rest.chars().all(plain) && rest.split(['-', '_', '.']).any(|run| run.len() >= MIN_TOKEN_BYTES)
}

#[cfg(test)]
mod tests {
    use super::is_secret;

    #[test]
    fn secrets_are_recognised_by_name_or_by_value() {
        let token = "hf_abcdefghijklmnopqrstuvwxyzABCDEFGH";
        for (name, value) in [
            ("HF_TOKEN", token),
            ("MY_VARIABLE", token),
            ("HUGGINGFACE_HUB_TOKEN", "0123456789abcdef0123"),
            ("AWS_SECRET_ACCESS_KEY", "short"),
            ("AWS_ACCESS_KEY", "0123456789ABCDEFGHIJ"),
            ("WANDB_API_KEY", "0123456789abcdef0123456789abcdef01234567"),
            ("WANDB_API_KEY_LAB", "0123456789abcdef0123456789abcdef01234567"),
            ("LAB_API_KEYS", "0123456789abcdef,fedcba9876543210"),
            ("AZURE_STORAGE_CONNECTION_STRING", "UseDevelopmentStorage=true"),
            ("STORE", "AccountName=lab;AccountKey=c2hvcnQ="),
            ("AI_TOOLKIT_AUTH", "0123456789abcdef"),
            ("db_password", "pw"),
            ("GITHUB", "ghp_0123456789abcdef0123456789"),
        ] {
            assert!(is_secret(name, value), "{name}={value}");
        }
        for (name, value) in [
            ("TRIGGER_TOKEN", "ohwx person"),
            ("CLASS_TOKEN", "cat"),
            ("HF_TOKEN", ""),
            ("TOKENIZER_PATH", "/models/clip-vit-large-patch14/tokenizer"),
            ("TOKEN_FOLDER", "/data/images/of/my/cat"),
            ("OUT", "/data/output_of_last_night_again"),
            ("MONKEY", "a-long-name-of-a-monkey-in-the-zoo"),
            ("KEY_OF_THE_ANSWERS", "a-long-name-of-a-key-to-the-answers"),
            ("API_KEY_FOLDER", "/data/keys/of/the/lab"),
            ("CONNECTION", "a-string-that-is-not-a-secret"),
            ("AUTHOR", "somebody_with_a_long_name"),
            ("HF_HOME", "hf_home/of/all/the/models"),
            ("DATA", "hf_dataset_of_small_images_2024"),
            ("ASIA_MODEL", "ASIAN-watercolours-of-the-last-century"),
        ] {
            assert!(!is_secret(name, value), "{name}={value}");
        }
    }
}
