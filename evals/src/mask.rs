//! Masking of secrets in everything that leaves: requests to a model, logs, reports, error messages. Known values are masked in whatever
//! usual encoding they come, and so are the shapes of well-known keys. Git hashes, checksums and other long identifiers are left alone:
//! they are needed for reasoning, and look like no key.

use regex::{Captures, Regex};
use std::{collections::BTreeSet, fmt, io, sync::LazyLock};

/// What stands where a secret stood.
pub const MASK: &str = "[masked]";

/// Secret values shorter than this are not masked: they would take half the text with them.
const SHORTEST: usize = 8;

/// A line longer than this is passed on in parts.
const LONGEST_LINE: usize = 64 * 1024;

/// Masks secrets in text.
#[derive(Clone, Default)]
pub struct Masker {
    /// Known secrets in all their encodings, longest first.
    needles: Vec<String>,
    pattern: Option<Regex>,
}

/// The names of environment variables that hold secrets have one of these words.
const SECRET_WORDS: [&str; 8] = ["KEY", "APIKEY", "TOKEN", "SECRET", "PASSWORD", "PASSWD", "CREDENTIAL", "CREDENTIALS"];

impl Masker {
    /// Masks these values, besides the known shapes.
    pub fn new<S: AsRef<str>>(secrets: impl IntoIterator<Item = S>) -> Self {
        let mut encodings = BTreeSet::new();
        for secret in secrets {
            let secret = secret.as_ref().trim();
            if secret.len() >= SHORTEST {
                encodings.extend(encodings_of(secret));
            }
        }
        let mut needles: Vec<String> = encodings.into_iter().collect();
        needles.sort_by_key(|needle| std::cmp::Reverse(needle.len()));
        let any = needles.iter().map(|needle| regex::escape(needle)).collect::<Vec<_>>().join("|");
        // Escaped literals always make a regular expression; only its size could refuse, and then plain replacement serves.
        let pattern = if needles.is_empty() { None } else { Regex::new(&any).ok() };
        Self { needles, pattern }
    }

    /// Masks the value of every environment variable whose name says that it is a secret (`OPENAI_API_KEY`, `GITHUB_TOKEN`), and of
    /// those in `more`. Values that are paths are not secrets.
    pub fn from_environment<S: AsRef<str>>(more: impl IntoIterator<Item = S>) -> Self {
        let is_secret = |name: &str| name.to_uppercase().split('_').any(|word| SECRET_WORDS.contains(&word));
        let found =
            std::env::vars_os().filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)));
        let found = found.filter(|(name, value)| is_secret(name) && !value.starts_with('/')).map(|(_, value)| value);
        let more: Vec<String> = more.into_iter().map(|secret| secret.as_ref().to_string()).collect();
        Self::new(found.chain(more))
    }

    /// `text` without its secrets.
    pub fn mask(&self, text: &str) -> String {
        let known = match &self.pattern {
            Some(pattern) => pattern.replace_all(text, MASK).into_owned(),
            None => self.needles.iter().fold(text.to_string(), |text, needle| text.replace(needle, MASK)),
        };
        SHAPES.iter().fold(known, |text, shape| shape.replace(&text))
    }

    /// Masks every text in a JSON value, its keys included.
    pub fn mask_json(&self, value: &serde_json::Value) -> serde_json::Value {
        use serde_json::Value;
        match value {
            Value::String(text) => Value::String(self.mask(text)),
            Value::Array(list) => Value::Array(list.iter().map(|item| self.mask_json(item)).collect()),
            Value::Object(map) => {
                Value::Object(map.iter().map(|(key, item)| (self.mask(key), self.mask_json(item))).collect())
            }
            other => other.clone(),
        }
    }

    /// A writer that masks what passes through to `to`, wherever the chunks are cut.
    pub fn writer<W: io::Write>(&self, to: W) -> MaskWriter<W> {
        MaskWriter { masker: self.clone(), held: Vec::new(), to: Some(to) }
    }

    /// How many bytes of `held` can be passed on: whatever comes next, no secret reaches across the cut.
    fn cut(&self, held: &str) -> usize {
        let mut cut = held.rfind('\n').map_or(0, |at| at + 1);
        if cut == 0 && held.len() > LONGEST_LINE {
            cut = held.rfind(char::is_whitespace).map_or(0, |at| held.ceil_char_boundary(at + 1));
            cut = if held.len() - cut > LONGEST_LINE { held.len() } else { cut };
        }
        if held.len() <= LONGEST_LINE {
            // A private key goes over many lines.
            if let Some(open) = held[..cut].rfind("-----BEGIN ").filter(|open| !held[*open..cut].contains("-----END "))
            {
                cut = open;
            }
        }
        // A known secret may hold line ends or stand in a long line.
        for needle in &self.needles {
            let most = needle.len().min(cut + 1);
            if let Some(begun) = (1..most).rev().find(|n| held.as_bytes()[..cut].ends_with(&needle.as_bytes()[..*n])) {
                cut -= begun;
            }
        }
        held.floor_char_boundary(cut)
    }
}

impl fmt::Debug for Masker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Masker of {} values", self.needles.len())
    }
}

/// The forms in which a secret turns up: as it is, in JSON, in a URL, in hex, and inside base64 of something longer.
fn encodings_of(secret: &str) -> Vec<String> {
    let json = serde_json::Value::from(secret).to_string();
    let percent = |hex: fn(u8) -> String| -> String {
        let plain = |b: u8| b.is_ascii_alphanumeric() || b"-._~".contains(&b);
        secret.bytes().map(|b| if plain(b) { char::from(b).to_string() } else { hex(b) }).collect()
    };
    let mut forms = vec![
        secret.to_string(),
        json[1..json.len() - 1].to_string(),
        percent(|b| format!("%{b:02X}")),
        percent(|b| format!("%{b:02x}")),
        percent(|b| if b == b' ' { "+".into() } else { format!("%{b:02X}") }),
        hex::encode(secret),
        hex::encode_upper(secret),
    ];
    // Where the secret starts at byte 0, 1 or 2 of a group of three, its characters differ; those at the ends also depend on the
    // neighbours and are left out.
    for shift in 0..3 {
        let padded = [&[0u8; 2][..shift], secret.as_bytes()].concat();
        let encoded = base64(&padded);
        let first = (shift * 8).div_ceil(6);
        let last = padded.len() * 8 / 6;
        let core = &encoded[first..last];
        forms.push(core.to_string());
        forms.push(core.replace('+', "-").replace('/', "_"));
    }
    forms
}

/// Standard base64 without padding.
fn base64(bytes: &[u8]) -> String {
    const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::new();
    for group in bytes.chunks(3) {
        let bits = group.iter().fold(0u32, |bits, b| bits << 8 | u32::from(*b)) << (8 * (3 - group.len()));
        for i in 0..=group.len() {
            text.push(char::from(ALPHABET[(bits >> (18 - 6 * i)) as usize & 63]));
        }
    }
    text
}

/// A shape of key. Its group `keep` stays; what else it matches is masked if it `looks` like a key.
struct Shape {
    pattern: Regex,
    looks: fn(&str) -> bool,
}

impl Shape {
    fn replace(&self, text: &str) -> String {
        let replaced = self.pattern.replace_all(text, |found: &Captures| {
            if !(self.looks)(&found[0]) {
                return found[0].to_string();
            }
            let group = |name| found.name(name).map_or("", |m| m.as_str());
            format!("{}{MASK}{}", group("keep"), group("after"))
        });
        replaced.into_owned()
    }
}

static SHAPES: LazyLock<Vec<Shape>> = LazyLock::new(|| {
    let has_digit = |text: &str| text.bytes().any(|b| b.is_ascii_digit());
    let shape = |pattern: &str, looks: fn(&str) -> bool| Shape {
        pattern: Regex::new(pattern).expect("a constant pattern"),
        looks,
    };
    vec![
        shape(r"-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|\z)", |_| true),
        // OpenAI, Anthropic and many that copy them. Words such as sk-learn-like-names have no digits.
        shape(r"\b(?:sk|rk|pk)-[A-Za-z0-9_-]{20,}", has_digit),
        shape(r"\b(?:sk|rk)_(?:live|test)_[A-Za-z0-9]{16,}", |_| true),
        shape(r"\bgh[pousr]_[A-Za-z0-9]{36,}", |_| true),
        shape(r"\bgithub_pat_[A-Za-z0-9_]{22,}", |_| true),
        shape(r"\bglpat-[A-Za-z0-9_-]{20,}", |_| true),
        shape(r"\bhf_[A-Za-z0-9]{30,}", |_| true),
        shape(r"\bgsk_[A-Za-z0-9]{40,}", |_| true),
        shape(r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b", |_| true),
        shape(r"\bAIza[0-9A-Za-z_-]{35}", |_| true),
        shape(r"\bxox[abeprs]-[A-Za-z0-9-]{10,}", |_| true),
        shape(r"\bnpm_[A-Za-z0-9]{36}\b", |_| true),
        shape(r"\beyJ[A-Za-z0-9_-]{10,}\.eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}", |_| true),
        shape(r#"(?i)(?P<keep>\bauthorization["']?\s*[:=]\s*["']?(?:bearer|basic|token)\s+)[^\s"',]+"#, |found| {
            !found.ends_with(MASK)
        }),
        shape(r"(?P<keep>[a-z]://[^\s/:@]*:)[^\s/@]+(?P<after>@)", |_| true),
    ]
});

/// Masks what is written through it. Text is held back to the end of its line (at most 64 KiB), so that a secret cut in two by chunks
/// is found; [`MaskWriter::finish`], or dropping it, passes on the rest.
pub struct MaskWriter<W: io::Write> {
    masker: Masker,
    held: Vec<u8>,
    to: Option<W>,
}

impl<W: io::Write> MaskWriter<W> {
    /// Passes on everything held, and gives back the writer below.
    ///
    /// # Errors
    /// When the writer below fails.
    pub fn finish(mut self) -> io::Result<W> {
        self.rest()?;
        Ok(self.to.take().expect("taken only here, which consumes self"))
    }

    fn rest(&mut self) -> io::Result<()> {
        let Some(to) = &mut self.to else { return Ok(()) };
        let text = String::from_utf8_lossy(&self.held);
        let masked = self.masker.mask(&text);
        self.held.clear();
        to.write_all(masked.as_bytes())?;
        to.flush()
    }
}

impl<W: io::Write> io::Write for MaskWriter<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.held.extend_from_slice(bytes);
        if !bytes.contains(&b'\n') && self.held.len() <= LONGEST_LINE {
            return Ok(bytes.len());
        }
        // A character cut by a chunk stays held: lines end between characters, and in long lines only whole characters are looked at.
        let whole = match std::str::from_utf8(&self.held) {
            Ok(_) => self.held.len(),
            Err(error) if error.error_len().is_none() => error.valid_up_to(),
            Err(_) => self.held.len(),
        };
        let text = String::from_utf8_lossy(&self.held[..whole]).into_owned();
        let tail = self.held.split_off(whole);
        let cut = self.masker.cut(&text);
        self.held = [&text.as_bytes()[cut..], &tail].concat();
        if let Some(to) = &mut self.to {
            to.write_all(self.masker.mask(&text[..cut]).as_bytes())?;
        }
        Ok(bytes.len())
    }

    /// Flushes what has been passed on. The line at hand stays held: to let it go might let half a secret go.
    fn flush(&mut self) -> io::Result<()> {
        self.to.as_mut().map_or(Ok(()), io::Write::flush)
    }
}

impl<W: io::Write> Drop for MaskWriter<W> {
    fn drop(&mut self) {
        // Nobody is left to hear of an error.
        let _ = self.rest();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::io::Write;

    const SECRET: &str = "s3cr3t/value+with=signs&more";

    #[test]
    fn known_values_are_masked_in_every_encoding() {
        let masker = Masker::new([SECRET]);
        assert_eq!(masker.mask(&format!("a {SECRET} b")), "a [masked] b");
        for text in [
            "s3cr3t%2Fvalue%2Bwith%3Dsigns%26more".to_string(),
            "s3cr3t%2fvalue%2bwith%3dsigns%26more".to_string(),
            hex::encode(SECRET),
        ] {
            assert_eq!(masker.mask(&text), MASK, "{text}");
        }
        for around in ["", "u", "us", "user:", "user:x"] {
            let encoded = base64(format!("{around}{SECRET}{around}").as_bytes());
            for form in [encoded.clone(), encoded.replace('+', "-").replace('/', "_")] {
                let masked = masker.mask(&form);
                // What is left of a secret are at most the two characters shared with its neighbours.
                assert!(
                    masked.contains(MASK) && masked.len() <= MASK.len() + form.len() - SECRET.len() * 4 / 3 + 4,
                    "{form}: {masked}"
                );
            }
        }
        let quoted = Masker::new(["pass\"word\\1"]);
        assert_eq!(quoted.mask(&serde_json::json!({"k": "pass\"word\\1"}).to_string()), "{\"k\":\"[masked]\"}");
    }

    #[test]
    fn known_shapes_are_masked() {
        let masker = Masker::default();
        for (text, masked) in [
            ("key sk-proj-abc123DEF456ghi789JKL012 end", "key [masked] end"),
            ("ghp_0123456789abcdefghijABCDEFGHIJ012345", "[masked]"),
            ("token=github_pat_11ABCDEFG0abcdefghijkl_xyz", "token=[masked]"),
            ("hf_abcdefghijklmnopqrstuvwxyzABCDEFGH", "[masked]"),
            ("AKIAIOSFODNN7EXAMPLE", "[masked]"),
            ("Authorization: Bearer abc.def", "Authorization: Bearer [masked]"),
            ("https://me:hunter22@host/x", "https://me:[masked]@host/x"),
            ("-----BEGIN RSA PRIVATE KEY-----\nMIIE\nabc\n-----END RSA PRIVATE KEY-----\nok", "[masked]\nok"),
        ] {
            assert_eq!(masker.mask(text), masked);
        }
    }

    #[test]
    fn hashes_and_names_are_left_alone() {
        let masker = Masker::new([SECRET, "short"]);
        for text in [
            "commit 8a6c8b23946c7c748a6224b99eae21a0d3be1fdd",
            "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
            "task-with-a-very-long-name-1234567890 risk-adjusted-return-over-12345 sk-learn-has-long-names-like-this",
            "model.layers.0.self_attn.q_proj.weight_0123456789abcdef0123456789",
            "https://host:8080/path?q=a@b.org",
            "short",
        ] {
            assert_eq!(masker.mask(text), text);
        }
    }

    #[test]
    fn json_is_masked_inside() {
        let masked = Masker::new([SECRET]).mask_json(&serde_json::json!({"a": [SECRET, 1], SECRET: null}));
        assert_eq!(masked, serde_json::json!({"a": [MASK, 1], MASK: null}));
    }

    fn through(masker: &Masker, bytes: &[u8], chunk: usize) -> String {
        let mut writer = masker.writer(Vec::new());
        for part in bytes.chunks(chunk) {
            writer.write_all(part).unwrap();
            writer.flush().unwrap();
        }
        String::from_utf8(writer.finish().unwrap()).unwrap()
    }

    #[test]
    fn secrets_are_masked_across_chunks() {
        let masker = Masker::new([SECRET, "two\nlined secret"]);
        let key = "-----BEGIN PRIVATE KEY-----\nAAAA\nBBBB\n-----END PRIVATE KEY-----";
        let text = format!(
            "ä {SECRET} b\nAuthorization: Bearer abcdef\nx two\nlined secret y\n{key}\nthe end: sk-abcdefghij0123456789"
        );
        let whole = masker.mask(&text);
        assert_eq!(whole.matches(MASK).count(), 5);
        for chunk in 1..80 {
            assert_eq!(through(&masker, text.as_bytes(), chunk), whole, "chunks of {chunk}");
        }
    }

    #[test]
    fn lines_without_end_are_passed_on_masked() {
        let masker = Masker::new([SECRET]);
        let text = format!("{}{SECRET}{}{SECRET}", "x".repeat(LONGEST_LINE - 10), "ü y".repeat(LONGEST_LINE / 2));
        let passed = through(&masker, text.as_bytes(), 1000);
        assert_eq!(passed, masker.mask(&text));
        let endless = "z".repeat(3 * LONGEST_LINE);
        assert_eq!(through(&masker, format!("{endless}{SECRET}").as_bytes(), 999), format!("{endless}{MASK}"));
    }

    proptest! {
        #[test]
        fn no_chunking_lets_a_secret_through(before in "[a-z \n]{0,30}", after in "[a-z \n]{0,30}", chunk in 1usize..20) {
            let masker = Masker::new([SECRET]);
            let text = format!("{before}{SECRET}{after}{SECRET}");
            prop_assert_eq!(through(&masker, text.as_bytes(), chunk), format!("{before}{MASK}{after}{MASK}"));
        }

        #[test]
        fn no_bytes_make_the_writer_panic(bytes in prop::collection::vec(any::<u8>(), 0..300), chunk in 1usize..50) {
            let mut writer = Masker::new([SECRET]).writer(Vec::new());
            for part in bytes.chunks(chunk) {
                writer.write_all(part).unwrap();
            }
            writer.finish().unwrap();
        }
    }
}
