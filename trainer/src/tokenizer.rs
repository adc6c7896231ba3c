//! Text to token ids and back: bytes, or characters of an alphabet, each with one more id that ends a text. Both map
//! strings to ids piece by piece, so a stop string is an id sequence. Subword tokenizers are not here.

use std::collections::{BTreeSet, HashMap};
use std::path::Path;

use hone_runs::failure::Context;
use hone_runs::{Class, Failure, Result};
use serde::{Deserialize, Serialize};

/// A tokenizer. Its last id ends a text.
#[derive(Clone, Debug, PartialEq)]
pub enum Tokenizer {
    /// One id a byte of UTF-8; 256 ends a text.
    Bytes,
    /// One id a character of an alphabet, by code point; the id after the last ends a text.
    Chars(Alphabet),
}

/// Distinct characters in code-point order.
#[derive(Clone, Debug, PartialEq)]
pub struct Alphabet {
    chars: Vec<char>,
    ids: HashMap<char, u32>,
}

/// How a tokenizer stands in its file.
#[derive(Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "kebab-case", deny_unknown_fields)]
enum Stored {
    Bytes,
    Chars { alphabet: String },
}

impl Tokenizer {
    /// The tokenizer of the characters that occur in `texts`.
    ///
    /// # Errors
    /// Usage, where there is no character.
    pub fn chars<'a>(texts: impl IntoIterator<Item = &'a str>) -> Result<Self> {
        let chars: Vec<char> = texts.into_iter().flat_map(str::chars).collect::<BTreeSet<_>>().into_iter().collect();
        if chars.is_empty() {
            return Err(Failure::new(Class::Usage, "There is no character to build an alphabet from.")
                .hint("Give texts, or use `tokenizer: bytes`."));
        }
        let ids = chars.iter().enumerate().map(|(i, &c)| (c, i as u32)).collect();
        Ok(Tokenizer::Chars(Alphabet { chars, ids }))
    }

    /// Number of ids.
    pub fn vocab_size(&self) -> usize {
        self.end() as usize + 1
    }

    /// The id that ends a text.
    pub fn end(&self) -> u32 {
        match self {
            Tokenizer::Bytes => 256,
            Tokenizer::Chars(alphabet) => alphabet.chars.len() as u32,
        }
    }

    /// The ids of `text`, without the end.
    ///
    /// # Errors
    /// Usage, where a character is not in the alphabet: an unknown-token id would lose text without a word.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        match self {
            Tokenizer::Bytes => Ok(text.bytes().map(u32::from).collect()),
            Tokenizer::Chars(alphabet) => text
                .chars()
                .map(|c| {
                    alphabet.ids.get(&c).copied().ok_or_else(|| {
                        Failure::new(Class::Usage, format!("The character {c:?} is not in the model's alphabet."))
                            .hint("Train with texts that have it, or with `tokenizer: bytes`.")
                    })
                })
                .collect(),
        }
    }

    /// The text of `ids`. The end id and ids past the vocabulary are left out; broken UTF-8 becomes U+FFFD.
    pub fn decode(&self, ids: &[u32]) -> String {
        match self {
            Tokenizer::Bytes => {
                let bytes: Vec<u8> = ids.iter().filter_map(|&id| u8::try_from(id).ok()).collect();
                String::from_utf8_lossy(&bytes).into_owned()
            }
            Tokenizer::Chars(alphabet) => ids.iter().filter_map(|&id| alphabet.chars.get(id as usize)).collect(),
        }
    }

    /// How many bytes of UTF-8 an id stands for; the end id for none.
    pub fn bytes_of(&self, id: u32) -> usize {
        match self {
            Tokenizer::Bytes => usize::from(id < 256),
            Tokenizer::Chars(alphabet) => alphabet.chars.get(id as usize).map_or(0, |c| c.len_utf8()),
        }
    }

    /// The tokenizer as JSON, as it stands in a checkpoint.
    pub fn to_json(&self) -> String {
        let stored = match self {
            Tokenizer::Bytes => Stored::Bytes,
            Tokenizer::Chars(alphabet) => Stored::Chars { alphabet: alphabet.chars.iter().collect() },
        };
        serde_json::to_string_pretty(&stored).expect("strings serialise")
    }

    /// Reads what [`Self::to_json`] wrote.
    ///
    /// # Errors
    /// Usage, where `json` is something else.
    pub fn from_json(json: &str) -> Result<Self> {
        match serde_json::from_str(json).context(Class::Usage, || "This is not a tokenizer".into())? {
            Stored::Bytes => Ok(Tokenizer::Bytes),
            Stored::Chars { alphabet } => Self::chars([alphabet.as_str()]),
        }
    }

    /// Reads a tokenizer file.
    ///
    /// # Errors
    /// Usage, where the file cannot be read or is no tokenizer.
    pub fn load(file: &Path) -> Result<Self> {
        let json = std::fs::read_to_string(file)
            .context(Class::Usage, || format!("Cannot read the tokenizer {}", file.display()))?;
        Self::from_json(&json).map_err(|e| e.at(file.display().to_string()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_round_trip_any_text() {
        let ids = Tokenizer::Bytes.encode("12+é=").unwrap();
        assert_eq!(ids, [49, 50, 43, 0xc3, 0xa9, 61]);
        assert_eq!(Tokenizer::Bytes.decode(&[&ids[..], &[256, 999]].concat()), "12+é=");
        assert_eq!((Tokenizer::Bytes.vocab_size(), Tokenizer::Bytes.end()), (257, 256));
        assert_eq!(Tokenizer::Bytes.decode(&[0xc3]), "\u{fffd}");
    }

    #[test]
    fn characters_take_ids_by_code_point_and_survive_their_file() {
        let chars = Tokenizer::chars(["21+", "1=é"]).unwrap();
        assert_eq!(chars.encode("+12=é").unwrap(), [0, 1, 2, 3, 4]);
        assert_eq!((chars.end(), chars.vocab_size()), (5, 6));
        assert_eq!(chars.decode(&[4, 5, 0]), "é+");
        assert_eq!((chars.bytes_of(4), chars.bytes_of(5)), (2, 0));
        assert_eq!(Tokenizer::from_json(&chars.to_json()).unwrap(), chars);
        assert_eq!(Tokenizer::from_json(&Tokenizer::Bytes.to_json()).unwrap(), Tokenizer::Bytes);
    }

    #[test]
    fn a_character_outside_the_alphabet_is_named() {
        let failure = Tokenizer::chars(["ab"]).unwrap().encode("abc").unwrap_err();
        assert_eq!(failure.class, Class::Usage);
        assert!(failure.message.contains("'c'"), "{failure}");
        assert!(Tokenizer::chars([""]).is_err());
        assert!(Tokenizer::from_json("{\"type\":\"chars\",\"alphabet\":\"ab\",\"more\":1}").is_err());
    }
}
