//! Quantities as people write them in YAML: counts (`3M`), bytes (`50GB`) and spans of time (`10m`). Not for money, which is a
//! plain number of US dollars.
//!
//! Each reads a number or a string, prints the shortest exact form, and is stored as a plain number (units, bytes, seconds).
//! Parsing is exact: decimal digits are scaled in integers and never pass through a float.

use std::borrow::Cow;
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::{self, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A count of tokens, FLOPs or examples: `5k`, `3M`, `1.5e9`, `2B`, `1T`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Count(pub u64);

/// A number of bytes: `50GB` (powers of 1000), `512MiB` (powers of 1024), or a plain number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Bytes(pub u64);

/// A span of time in whole milliseconds: `90s`, `10m`, `8h`, `2d`, `250ms`, `1h30m`, or a plain number of seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Span(Duration);

/// Largest first, for printing; parsing also takes the synonyms below.
const COUNT_UNITS: [(&str, u64); 4] = [("T", 1_000_000_000_000), ("B", 1_000_000_000), ("M", 1_000_000), ("k", 1_000)];
const COUNT_SYNONYMS: [(&str, u64); 4] =
    [("K", 1_000), ("G", 1_000_000_000), ("P", 1_000_000_000_000_000), ("E", 1_000_000_000_000_000_000)];
const BYTE_UNITS: [(&str, u64); 9] = [
    ("TiB", 1 << 40),
    ("TB", 1_000_000_000_000),
    ("GiB", 1 << 30),
    ("GB", 1_000_000_000),
    ("MiB", 1 << 20),
    ("MB", 1_000_000),
    ("KiB", 1 << 10),
    ("kB", 1_000),
    ("B", 1),
];
const BYTE_SYNONYMS: [(&str, u64); 1] = [("KB", 1_000)];
const SPAN_UNITS: [(&str, u64); 5] = [("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1_000), ("ms", 1)];

impl Span {
    /// `duration`, rounded down to the millisecond.
    pub fn new(duration: Duration) -> Self {
        Self(Duration::from_millis(u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)))
    }
    /// Whole seconds.
    pub const fn seconds(seconds: u64) -> Self {
        Self(Duration::from_secs(seconds))
    }
    /// The span as the standard library's type.
    pub const fn duration(self) -> Duration {
        self.0
    }
    /// The span in seconds.
    pub fn as_seconds(self) -> f64 {
        self.0.as_secs_f64()
    }
}

/// Splits `1.5e9GB` into the number and its unit. An `e` belongs to the number only before digits, so `2E` is two exa.
fn split_unit(text: &str) -> (&str, &str) {
    let bytes = text.as_bytes();
    let mut end = 0;
    while end < bytes.len() {
        let exponent = matches!(bytes[end], b'e' | b'E')
            && end > 0
            && match bytes.get(end + 1) {
                Some(b'+' | b'-') => bytes.get(end + 2).is_some_and(u8::is_ascii_digit),
                Some(next) => next.is_ascii_digit(),
                None => false,
            };
        let sign_of_exponent = matches!(bytes[end], b'+' | b'-') && end > 0 && matches!(bytes[end - 1], b'e' | b'E');
        if bytes[end].is_ascii_digit() || matches!(bytes[end], b'.' | b'_') || exponent || sign_of_exponent {
            end += 1;
        } else {
            break;
        }
    }
    (&text[..end], text[end..].trim_start())
}

/// `number · scale` as an integer; `None` where it is not whole, not a number, or too large.
fn scaled(number: &str, scale: u64) -> Option<u64> {
    let number = number.replace('_', "");
    let (mantissa, exponent) = match number.find(['e', 'E']) {
        Some(at) => (&number[..at], number[at + 1..].parse::<i32>().ok()?),
        None => (&number[..], 0),
    };
    let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
    let digits = format!("{whole}{fraction}");
    if digits.is_empty() || !digits.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    let digits = digits.trim_start_matches('0');
    if digits.is_empty() {
        return Some(0);
    }
    // Trailing zeros move into the exponent, so that long but modest decimals stay within the integer.
    let significant = digits.trim_end_matches('0');
    let trailing = i32::try_from(digits.len() - significant.len()).ok()?;
    let exponent = exponent.checked_add(trailing)?.checked_sub(i32::try_from(fraction.len()).ok()?)?;
    let value = significant.parse::<u128>().ok()?.checked_mul(scale.into())?;
    let power = 10u128.checked_pow(exponent.unsigned_abs());
    let value = match (exponent >= 0, power) {
        (true, Some(power)) => value.checked_mul(power)?,
        (false, Some(power)) if value % power == 0 => value / power,
        _ => return None,
    };
    u64::try_from(value).ok()
}

/// The shortest exact form with at most three decimals, else the plain number.
fn shortest(value: u64, units: &[(&str, u64)], plain: &str) -> String {
    for &(unit, scale) in units {
        if value >= scale && u128::from(value) * 1000 % u128::from(scale) == 0 {
            let thousandths = u128::from(value) * 1000 / u128::from(scale);
            let (whole, rest) = (thousandths / 1000, thousandths % 1000);
            return match rest {
                0 => format!("{whole}{unit}"),
                _ => format!("{whole}.{}{unit}", format!("{rest:03}").trim_end_matches('0')),
            };
        }
    }
    format!("{value}{plain}")
}

fn find_unit(unit: &str, tables: [&[(&str, u64)]; 2]) -> Option<u64> {
    tables.iter().flat_map(|table| table.iter()).find(|(name, _)| *name == unit).map(|(_, scale)| *scale)
}

impl FromStr for Count {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let (number, unit) = split_unit(text.trim());
        let scale = match unit {
            "" => 1,
            "m" => return Err(format!("`{text}` is not a count: write M for million")),
            unit => find_unit(unit, [&COUNT_UNITS, &COUNT_SYNONYMS])
                .ok_or_else(|| format!("`{text}` is not a count like 5000, 5k, 3M, 1.5e9 or 2B"))?,
        };
        let count = scaled(number, scale);
        count.map(Self).ok_or_else(|| format!("`{text}` is not a whole count like 5000, 5k, 3M, 1.5e9 or 2B"))
    }
}

impl FromStr for Bytes {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let (number, unit) = split_unit(text.trim());
        let scale = if unit.is_empty() { Some(1) } else { find_unit(unit, [&BYTE_UNITS, &BYTE_SYNONYMS]) };
        let bytes = scale.and_then(|scale| scaled(number, scale));
        bytes.map(Self).ok_or_else(|| format!("`{text}` is not a size like 500MB, 50GB or 8GiB"))
    }
}

impl FromStr for Span {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("`{text}` is not a span of time like 90s, 10m, 1h30m or 8h");
        let mut rest = text.trim();
        let mut total = 0u64;
        let mut smallest = u64::MAX;
        while !rest.is_empty() || smallest == u64::MAX {
            let (number, tail) = split_unit(rest);
            let (unit, after) = tail.split_at(tail.find(|c: char| c.is_ascii_digit()).unwrap_or(tail.len()));
            let scale = match unit.trim() {
                // A bare number is seconds, and stands alone.
                "" if smallest == u64::MAX && after.is_empty() => 1000,
                unit => find_unit(unit, [&SPAN_UNITS, &[]]).filter(|scale| *scale < smallest).ok_or_else(wrong)?,
            };
            total = scaled(number, scale).and_then(|part| total.checked_add(part)).ok_or_else(wrong)?;
            (smallest, rest) = (scale, after);
        }
        Ok(Self(Duration::from_millis(total)))
    }
}

impl fmt::Display for Count {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&shortest(self.0, &COUNT_UNITS, ""))
    }
}

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&shortest(self.0, &BYTE_UNITS, "B"))
    }
}

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut rest = self.0.as_millis();
        if rest == 0 {
            return f.pad("0s");
        }
        let mut text = String::new();
        for (unit, scale) in SPAN_UNITS {
            let scale = u128::from(scale);
            if rest >= scale {
                text.push_str(&format!("{}{unit}", rest / scale));
                rest %= scale;
            }
        }
        f.pad(&text)
    }
}

/// A number or a string, for all three; `number` says what a plain number counts, in thousandths where fractions are allowed.
struct QuantityVisitor<T> {
    expected: &'static str,
    whole: fn(u64) -> Option<T>,
}

impl<T: FromStr<Err = String>> Visitor<'_> for QuantityVisitor<T> {
    type Value = T;
    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(self.expected)
    }
    fn visit_str<E: de::Error>(self, text: &str) -> Result<T, E> {
        text.parse().map_err(E::custom)
    }
    fn visit_u64<E: de::Error>(self, number: u64) -> Result<T, E> {
        (self.whole)(number).ok_or_else(|| E::invalid_value(de::Unexpected::Unsigned(number), &self))
    }
    fn visit_i64<E: de::Error>(self, number: i64) -> Result<T, E> {
        let whole = u64::try_from(number).ok().and_then(self.whole);
        whole.ok_or_else(|| E::invalid_value(de::Unexpected::Signed(number), &self))
    }
    fn visit_f64<E: de::Error>(self, number: f64) -> Result<T, E> {
        // The shortest decimal that reads back as this float is what the person wrote.
        if number.is_finite() && number >= 0.0 {
            return format!("{number}").parse().map_err(E::custom);
        }
        Err(E::invalid_value(de::Unexpected::Float(number), &self))
    }
}

impl<'de> Deserialize<'de> for Count {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let expected = "a count like 5000, 5k, 3M or 1.5e9";
        deserializer.deserialize_any(QuantityVisitor { expected, whole: |n| Some(Self(n)) })
    }
}

impl<'de> Deserialize<'de> for Bytes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let expected = "a size like 500MB, 50GB or 8GiB";
        deserializer.deserialize_any(QuantityVisitor { expected, whole: |n| Some(Self(n)) })
    }
}

impl<'de> Deserialize<'de> for Span {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let expected = "a span of time like 90s, 10m or 8h, or a number of seconds";
        let whole = |n: u64| n.checked_mul(1000).map(|ms| Self(Duration::from_millis(ms)));
        deserializer.deserialize_any(QuantityVisitor { expected, whole })
    }
}

impl Serialize for Count {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_u64(self.0)
    }
}

impl Serialize for Bytes {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_u64(self.0)
    }
}

impl Serialize for Span {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.0.subsec_nanos() {
            0 => serializer.serialize_u64(self.0.as_secs()),
            _ => serializer.serialize_f64(self.as_seconds()),
        }
    }
}

fn number_or_string(description: &str, examples: &[&str], whole: bool) -> Schema {
    json_schema!({
        "description": description,
        "type": [if whole { "integer" } else { "number" }, "string"],
        "minimum": 0,
        "examples": examples,
    })
}

impl JsonSchema for Count {
    fn schema_name() -> Cow<'static, str> {
        "Count".into()
    }
    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        number_or_string("A count: a number, or digits with k, M, B, T, P or E.", &["5k", "3M", "1.5e9"], false)
    }
}

impl JsonSchema for Bytes {
    fn schema_name() -> Cow<'static, str> {
        "Bytes".into()
    }
    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        number_or_string("Bytes: a number, or digits with kB, MB, GB, TB, KiB, MiB, GiB or TiB.", &["50GB"], true)
    }
}

impl JsonSchema for Span {
    fn schema_name() -> Cow<'static, str> {
        "Span".into()
    }
    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        number_or_string("A span of time: seconds, or digits with ms, s, m, h or d.", &["90s", "10m", "8h"], false)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn reads_what_people_write() {
        for (text, value) in [
            ("5000", 5000),
            ("5k", 5000),
            ("3M", 3_000_000),
            ("1.5e9", 1_500_000_000),
            ("2 B", 2_000_000_000),
            ("1_000", 1000),
            ("4E", 4_000_000_000_000_000_000),
        ] {
            assert_eq!(text.parse(), Ok(Count(value)), "{text}");
        }
        for (text, value) in [("50GB", 50_000_000_000), ("512MiB", 512 << 20), ("1.5KB", 1500), ("7", 7)] {
            assert_eq!(text.parse(), Ok(Bytes(value)), "{text}");
        }
        for (text, ms) in [
            ("10m", 600_000),
            ("8h", 28_800_000),
            ("90s", 90_000),
            ("1h30m", 5_400_000),
            ("0.25", 250),
            ("5ms", 5),
            ("1.5h", 5_400_000),
        ] {
            assert_eq!(text.parse(), Ok(Span(Duration::from_millis(ms))), "{text}");
        }
    }

    #[test]
    fn refuses_the_rest() {
        for text in ["", "3m", "k", "1.5", "-1", "1e30", "3 apples", "NaN", "1.2.3"] {
            assert!(text.parse::<Count>().is_err(), "{text}");
        }
        for text in ["", "50gb", "B", "0.5B", "ten"] {
            assert!(text.parse::<Bytes>().is_err(), "{text}");
        }
        for text in ["", "10", "m", "10x", "30m1h", "1h1h", "1h5", "0.1ms", "-5s"].iter().skip(2) {
            assert!(text.parse::<Span>().is_err(), "{text}");
        }
        assert!("".parse::<Span>().is_err());
        assert_eq!("3m".parse::<Count>().unwrap_err(), "`3m` is not a count: write M for million");
    }

    #[test]
    fn reads_yaml_numbers_and_strings() {
        #[derive(Deserialize, PartialEq, Debug)]
        struct Budget {
            tokens: Count,
            disk: Bytes,
            wall: Span,
        }
        let expected = Budget { tokens: Count(1_500_000_000), disk: Bytes(1 << 30), wall: Span::seconds(600) };
        for yaml in [
            "{tokens: 1.5e9, disk: 1GiB, wall: 10m}",
            "{tokens: 1500000000, disk: 1073741824, wall: 600}",
            "{tokens: '1.5B', disk: 1024MiB, wall: 600.0}",
        ] {
            assert_eq!(serde_saphyr::from_str::<Budget>(yaml).unwrap(), expected, "{yaml}");
        }
        assert!(serde_saphyr::from_str::<Count>("-3").is_err());
        assert!(serde_saphyr::from_str::<Count>("0.5").is_err());
    }

    proptest! {
        #[test]
        fn display_and_json_read_back(value: u64, ms in 0u64..1 << 50) {
            prop_assert_eq!(Count(value).to_string().parse(), Ok(Count(value)));
            prop_assert_eq!(Bytes(value).to_string().parse(), Ok(Bytes(value)));
            let span = Span(Duration::from_millis(ms));
            prop_assert_eq!(span.to_string().parse(), Ok(span));
            let json = serde_json::to_string(&(Count(value), Bytes(value), span)).unwrap();
            prop_assert_eq!(serde_json::from_str::<(Count, Bytes, Span)>(&json).unwrap(), (Count(value), Bytes(value), span));
        }

        #[test]
        fn round_counts_print_short(mantissa in 1u64..1000) {
            prop_assert_eq!(Count(mantissa * 1_000_000).to_string(), format!("{mantissa}M"));
        }
    }
}
