//! TensorBoard event files: framed records of `Event` protobufs, as far as scalars need them. A writer for runs, a reader for tests
//! and tools; not a protobuf library.
//!
//! A record is `u64 length, u32 masked CRC32C(length), bytes, u32 masked CRC32C(bytes)`, little endian. Fields used of `Event`:
//! 1 wall_time (double), 2 step (int64), 3 file_version, 5 summary, 7 session_log; of a summary's value: 1 tag, 2 simple_value.

use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

/// Writes one event file.
pub struct EventWriter {
    file: File,
    path: PathBuf,
}

/// Tells apart files that one process begins within one second.
static FILES: AtomicU32 = AtomicU32::new(0);

impl EventWriter {
    /// Creates a new event file in `dir`. `purge_from` tells TensorBoard that a restarted run supersedes everything logged at that
    /// step or later.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn create(dir: &Path, purge_from: Option<u64>) -> io::Result<Self> {
        std::fs::create_dir_all(dir)?;
        let time = crate::clock::now();
        let (process, count) = (std::process::id(), FILES.fetch_add(1, Ordering::Relaxed));
        let path = dir.join(format!("events.out.tfevents.{}.{process}.{count}", time.as_secs()));
        let mut writer = Self { file: File::create_new(&path)?, path };
        let mut version = Vec::new();
        put_double(&mut version, 1, time.as_secs_f64());
        put_bytes(&mut version, 3, b"brain.Event:2");
        writer.write(&version)?;
        if let Some(step) = purge_from {
            let mut start = Vec::new();
            put_double(&mut start, 1, time.as_secs_f64());
            put_varint(&mut start, 2, step);
            put_bytes(&mut start, 7, &[1 << 3, 1]); // SessionLog { status: START }
            writer.write(&start)?;
        }
        Ok(writer)
    }

    /// Where the file lies.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Writes the scalars of one step; `wall_time` in seconds since the Unix epoch. TensorBoard keeps them as f32.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn scalars(&mut self, wall_time: f64, step: u64, values: &[(&str, f64)]) -> io::Result<()> {
        let mut summary = Vec::new();
        for (tag, value) in values {
            let mut scalar = Vec::new();
            put_bytes(&mut scalar, 1, tag.as_bytes());
            scalar.push(2 << 3 | 5);
            scalar.extend((*value as f32).to_le_bytes());
            put_bytes(&mut summary, 1, &scalar);
        }
        let mut event = Vec::new();
        put_double(&mut event, 1, wall_time);
        put_varint(&mut event, 2, step);
        put_bytes(&mut event, 5, &summary);
        self.write(&event)
    }

    /// One write call a record, so that a killed run leaves at most its last record torn.
    fn write(&mut self, event: &[u8]) -> io::Result<()> {
        self.file.write_all(&record(event))
    }
}

fn record(data: &[u8]) -> Vec<u8> {
    let length = (data.len() as u64).to_le_bytes();
    [&length[..], &masked_crc(&length).to_le_bytes(), data, &masked_crc(data).to_le_bytes()].concat()
}

const CRC_TABLE: [u32; 256] = {
    let mut table = [0; 256];
    let mut byte = 0;
    while byte < 256 {
        let mut crc = byte as u32;
        let mut bit = 0;
        while bit < 8 {
            crc = if crc & 1 == 1 { crc >> 1 ^ 0x82f6_3b78 } else { crc >> 1 };
            bit += 1;
        }
        table[byte] = crc;
        byte += 1;
    }
    table
};

/// CRC-32C (Castagnoli).
fn crc32c(data: &[u8]) -> u32 {
    !data.iter().fold(!0, |crc: u32, byte| crc >> 8 ^ CRC_TABLE[((crc ^ u32::from(*byte)) & 0xff) as usize])
}

/// The CRC as records carry it: rotated and offset, so that a CRC of data that holds CRCs stays sound.
fn masked_crc(data: &[u8]) -> u32 {
    crc32c(data).rotate_right(15).wrapping_add(0xa282_ead8)
}

fn raw_varint(into: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        into.push(value as u8 | 0x80);
        value >>= 7;
    }
    into.push(value as u8);
}

fn put_varint(into: &mut Vec<u8>, field: u8, value: u64) {
    into.push(field << 3);
    raw_varint(into, value);
}

fn put_double(into: &mut Vec<u8>, field: u8, value: f64) {
    into.push(field << 3 | 1);
    into.extend(value.to_le_bytes());
}

fn put_bytes(into: &mut Vec<u8>, field: u8, value: &[u8]) {
    into.push(field << 3 | 2);
    raw_varint(into, value.len() as u64);
    into.extend(value);
}

/// A scalar read from an event file.
#[derive(Clone, Debug, PartialEq)]
pub struct Scalar {
    /// Training step.
    pub step: u64,
    /// The metric's name.
    pub tag: String,
    /// The value, as TensorBoard keeps it.
    pub value: f32,
}

/// Reads the scalars of an event file; a torn last record is passed over.
///
/// # Errors
/// When the file cannot be read, a checksum does not match, or a message is malformed.
pub fn read(path: &Path) -> io::Result<Vec<Scalar>> {
    let bytes = std::fs::read(path)?;
    let mut rest = &bytes[..];
    let mut scalars = Vec::new();
    let damaged = |what: &str| io::Error::new(io::ErrorKind::InvalidData, format!("{}: {what}", path.display()));
    while rest.len() >= 12 {
        let (length, data) = rest.split_at(8);
        if data[..4] != masked_crc(length).to_le_bytes() {
            return Err(damaged("the checksum of a length does not match"));
        }
        let length = length.iter().rev().fold(0usize, |sum, byte| sum << 8 | usize::from(*byte));
        let Some(event) = data[4..].get(..length.saturating_add(4)) else { break };
        let (event, crc) = event.split_at(length);
        if crc != masked_crc(event).to_le_bytes() {
            return Err(damaged("the checksum of a record does not match"));
        }
        event_scalars(event, &mut scalars).ok_or_else(|| damaged("a record is not an event"))?;
        rest = &data[8 + length..];
    }
    Ok(scalars)
}

fn event_scalars(event: &[u8], into: &mut Vec<Scalar>) -> Option<()> {
    let (mut step, mut summary) = (0, &[][..]);
    fields(event, |field, value| match (field, value) {
        (2, Field::Number(number)) => step = number,
        (5, Field::Bytes(bytes)) => summary = bytes,
        _ => {}
    })?;
    let mut values = Vec::new();
    fields(summary, |field, value| match value {
        Field::Bytes(bytes) if field == 1 => values.push(bytes),
        _ => {}
    })?;
    for bytes in values {
        let (mut tag, mut scalar) = (String::new(), None);
        fields(bytes, |field, value| match (field, value) {
            (1, Field::Bytes(bytes)) => tag = String::from_utf8_lossy(bytes).into_owned(),
            (2, Field::Number(bits)) => scalar = Some(f32::from_bits(bits as u32)),
            _ => {}
        })?;
        into.extend(scalar.map(|value| Scalar { step, tag, value }));
    }
    Some(())
}

enum Field<'a> {
    /// A varint's value, or the bits of a fixed-width number.
    Number(u64),
    Bytes(&'a [u8]),
}

fn fields<'a>(mut message: &'a [u8], mut each: impl FnMut(u64, Field<'a>)) -> Option<()> {
    while !message.is_empty() {
        let key = take_varint(&mut message)?;
        let value = match key & 7 {
            0 => Field::Number(take_varint(&mut message)?),
            1 => Field::Number(u64::from_le_bytes(message.split_off(..8)?.try_into().ok()?)),
            2 => {
                let length = usize::try_from(take_varint(&mut message)?).ok()?;
                Field::Bytes(message.split_off(..length)?)
            }
            5 => Field::Number(u32::from_le_bytes(message.split_off(..4)?.try_into().ok()?).into()),
            _ => return None,
        };
        each(key >> 3, value);
    }
    Some(())
}

fn take_varint(message: &mut &[u8]) -> Option<u64> {
    let mut value = 0;
    for shift in (0..64).step_by(7) {
        let byte = *message.split_off_first()?;
        value |= u64::from(byte & 0x7f) << shift;
        if byte < 0x80 {
            return Some(value);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn crc32c_matches_published_vectors() {
        // RFC 3720, appendix B.4.
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
        assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
        assert_eq!(crc32c(&[0xff; 32]), 0x62a8_ab43);
    }

    #[test]
    fn a_record_is_framed_as_tensorboard_expects() {
        let framed = record(b"123456789");
        assert_eq!(framed[..8], [9, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(framed[12..21], *b"123456789");
        // The CRC of this text, 0xe3069283, rotated right by 15 bits, plus the offset.
        let masked = 0x2507_c60du32.wrapping_add(0xa282_ead8);
        assert_eq!(framed[21..], masked.to_le_bytes());
    }

    #[test]
    fn an_event_is_encoded_field_by_field() {
        let dir = tempfile::tempdir().unwrap();
        let mut writer = EventWriter::create(dir.path(), None).unwrap();
        writer.scalars(1.0, 300, &[("a", 0.5)]).unwrap();
        let bytes = std::fs::read(writer.path()).unwrap();
        let mut event = vec![0x09];
        event.extend(1.0f64.to_le_bytes());
        event.extend([0x10, 0xac, 0x02, 0x2a, 0x0a, 0x0a, 0x08, 0x0a, 0x01, b'a', 0x15]);
        event.extend(0.5f32.to_le_bytes());
        assert!(bytes.ends_with(&record(&event)));
        assert!(bytes[12..].windows(13).any(|window| window == b"brain.Event:2"));
    }

    #[test]
    fn scalars_read_back_past_a_torn_record() {
        let dir = tempfile::tempdir().unwrap();
        let mut writer = EventWriter::create(dir.path(), Some(4)).unwrap();
        writer.scalars(1.0, 4, &[("loss", 2.0), ("train/reward", -1.5)]).unwrap();
        writer.scalars(1.0, 5, &[("loss", 1.0)]).unwrap();
        let scalar = |step, tag: &str, value| Scalar { step, tag: tag.into(), value };
        let whole = [scalar(4, "loss", 2.0), scalar(4, "train/reward", -1.5), scalar(5, "loss", 1.0)];
        assert_eq!(read(writer.path()).unwrap(), whole);
        let mut bytes = std::fs::read(writer.path()).unwrap();
        bytes.truncate(bytes.len() - 3);
        std::fs::write(writer.path(), &bytes).unwrap();
        assert_eq!(read(writer.path()).unwrap(), whole[..2]);
        bytes[30] ^= 1;
        std::fs::write(writer.path(), &bytes).unwrap();
        assert_eq!(read(writer.path()).unwrap_err().kind(), io::ErrorKind::InvalidData);
    }
}
