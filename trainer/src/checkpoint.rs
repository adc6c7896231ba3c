//! Checkpoints: a folder in Hugging Face's layout, written whole or not at all, hashed by content. What a trainer needs to
//! go on lies beside the model. Loading lists every tensor that does not fit. Foreign checkpoints are not read here.
//!
//! ```text
//! step-200/
//!   config.json             the standard MiniMax keys, and ours under `hone`
//!   generation_config.json
//!   model.safetensors       f32; matrices [out, in], an expert a tensor
//!   hone_tokenizer.json     bytes or characters
//!   optimizer.safetensors   moments `m.NAME`, `v.NAME`, as they lie in memory    (where a trainer saved)
//!   trainer.json            the trainer's own state                              (where a trainer saved)
//!   hone.json               hashes; written last: a folder without it is no checkpoint
//! ```

use std::borrow::Cow;
use std::collections::HashMap;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use candle_core::DType;
use hone_kernels::Tensor;
use hone_runs::failure::Context;
use hone_runs::{Class, Failure, Result};
use safetensors::{Dtype, SafeTensorError, SafeTensors, View};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::config::ModelConfig;
use crate::decoder::{Decoder, Weights};
use crate::hugging_face;
use crate::tokenizer::Tokenizer;
use crate::weights::{Layout, Planned, gather, plan, plan_buffers};

const MARKER: &str = "hone.json";
const CONFIG: &str = "config.json";
const GENERATION: &str = "generation_config.json";
const MODEL: &str = "model.safetensors";
const TOKENIZER: &str = "hone_tokenizer.json";
const OPTIMIZER: &str = "optimizer.safetensors";
const TRAINER: &str = "trainer.json";
/// Version of the layout above.
const FORMAT: u32 = 1;

/// What a trainer needs to go on: its own opaque state and AdamW's moments.
#[derive(Clone, Debug, PartialEq)]
pub struct TrainerState {
    /// Whatever the trainer keeps. Part of the hash.
    pub state: serde_json::Value,
    /// First moments, as the weights.
    pub m: Weights,
    /// Second moments, as the weights.
    pub v: Weights,
}

/// A loaded checkpoint.
#[derive(Clone, Debug)]
pub struct Checkpoint {
    /// The model.
    pub decoder: Decoder,
    /// Its tokenizer.
    pub tokenizer: Tokenizer,
    /// Hash of all its content, hex: what [`save`] returned.
    pub hash: String,
    /// Hash of the model alone (config, tokenizer, weights), hex: equal models have equal ones, however they were trained.
    pub model_hash: String,
    /// What the trainer saved, where it did and it was asked for.
    pub trainer: Option<TrainerState>,
}

/// The marker's content.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Marker {
    format: u32,
    /// Of `model` and `trainer` together.
    hash: String,
    model: String,
    trainer: Option<String>,
}

impl Marker {
    fn new(model: String, trainer: Option<String>) -> Self {
        let hash = hex::encode(Sha256::digest(format!("{model} {}", trainer.as_deref().unwrap_or("-"))));
        Self { format: FORMAT, hash, model, trainer }
    }
}

/// Writes a checkpoint to `dir`, replacing one that is there, and returns its hash. The folder is written and synced under
/// another name beside `dir` and then renamed, so that a killed save leaves no `dir`, or the old one.
/// `trainer` is the trainer's state and its first and second moments.
///
/// # Errors
/// Infrastructure, where files cannot be written.
pub fn save(
    dir: &Path,
    decoder: &Decoder,
    tokenizer: &Tokenizer,
    trainer: Option<(&serde_json::Value, &Weights, &Weights)>,
) -> Result<String> {
    let failed = || format!("Cannot save the checkpoint {}", dir.display());
    write(dir, decoder, tokenizer, trainer).context(Class::Infrastructure, failed)
}

fn write(
    dir: &Path,
    decoder: &Decoder,
    tokenizer: &Tokenizer,
    trainer: Option<(&serde_json::Value, &Weights, &Weights)>,
) -> std::io::Result<String> {
    let beside = |suffix: &str| {
        let name = dir.file_name().map_or_else(|| "checkpoint".into(), |n| n.to_string_lossy());
        dir.with_file_name(format!(".{name}.{suffix}"))
    };
    let (temporary, old) = (beside("tmp"), beside("old"));
    for leftover in [&temporary, &old] {
        if leftover.exists() {
            fs::remove_dir_all(leftover)?;
        }
    }
    fs::create_dir_all(&temporary)?;
    let put = |name: &str, content: &[u8]| {
        let mut file = File::create(temporary.join(name))?;
        file.write_all(content)?;
        file.sync_all()
    };

    let config = hugging_face::config(&decoder.config, tokenizer.end());
    put(CONFIG, pretty(&config).as_bytes())?;
    put(GENERATION, pretty(&hugging_face::generation_config(tokenizer.end())).as_bytes())?;
    put(TOKENIZER, tokenizer.to_json().as_bytes())?;
    let c = &decoder.config;
    let mut tensors = to_disk(&plan(c), &decoder.weights);
    tensors.extend(to_disk(&plan_buffers(c), &decoder.buffers));
    let model = model_hash(c, tokenizer, tensors.iter().map(|t| tensor_part(&t.name, t)).collect());
    store(&temporary.join(MODEL), tensors)?;

    let trainer = match trainer {
        None => None,
        Some((state, m, v)) => {
            let state = pretty(state);
            put(TRAINER, state.as_bytes())?;
            let moments = [("m", m), ("v", v)];
            let tensors: Vec<Stored> = moments
                .into_iter()
                .flat_map(|(kind, weights)| {
                    weights.iter().map(move |(name, t)| Stored {
                        name: format!("{kind}.{name}"),
                        shape: t.shape().to_vec(),
                        data: t.data(),
                        transposed: false,
                    })
                })
                .collect();
            let hash = trainer_hash(&state, tensors.iter().map(|t| tensor_part(&t.name, t)).collect());
            store(&temporary.join(OPTIMIZER), tensors)?;
            Some(hash)
        }
    };
    let marker = Marker::new(model, trainer);
    put(MARKER, pretty(&marker).as_bytes())?;
    File::open(&temporary)?.sync_all()?;
    if dir.exists() {
        fs::rename(dir, &old)?;
    }
    fs::rename(&temporary, dir)?;
    if let Some(parent) = dir.parent().filter(|p| !p.as_os_str().is_empty()) {
        File::open(parent)?.sync_all()?;
    }
    if old.exists() {
        fs::remove_dir_all(&old)?;
    }
    Ok(marker.hash)
}

/// Loads the checkpoint in `dir`, and with `trainer` also what the trainer needs to go on. What is read is checked against
/// its hash.
///
/// # Errors
/// Usage, where `dir` holds no checkpoint; Integrity, where its content is not what was saved: files that are missing or
/// damaged, tensors that are missing, unknown or of another shape (all are listed), or another hash.
pub fn load(dir: &Path, trainer: bool) -> Result<Checkpoint> {
    let damaged = |message: String| {
        Failure::new(Class::Integrity, message)
            .hint("It was changed after it was saved, or the disk failed: use an earlier checkpoint.")
    };
    let read = |name: &str| {
        let file = dir.join(name);
        fs::read(&file).map_err(|e| {
            let message = format!("Cannot read {}: {e}.", file.display());
            // The marker is written last: where it stands, the others stood too.
            let lost = name != MARKER && e.kind() == std::io::ErrorKind::NotFound;
            if lost { damaged(message) } else { Failure::new(Class::Usage, message) }
        })
    };
    let unreadable = |name: &str| {
        let file = dir.join(name);
        move || format!("{} is damaged or of another kind", file.display())
    };
    let marker: Marker = serde_json::from_slice(&read(MARKER)?).context(Class::Usage, unreadable(MARKER))?;
    if marker.format != FORMAT {
        let message =
            format!("The checkpoint {} has format {}; this Hone reads {FORMAT}.", dir.display(), marker.format);
        return Err(Failure::new(Class::Usage, message).hint("Use the version of Hone that wrote it."));
    }
    let changed = || damaged(format!("The checkpoint {} is not what its hash says.", dir.display()));
    let integrity = |failure: Failure| Failure { class: Class::Integrity, ..failure };

    let config: serde_json::Value =
        serde_json::from_slice(&read(CONFIG)?).context(Class::Integrity, unreadable(CONFIG))?;
    let config: ModelConfig =
        serde_json::from_value(config["hone"].clone()).context(Class::Integrity, unreadable(CONFIG))?;
    config.validate().map_err(|f| damaged(format!("{}: {}", dir.join(CONFIG).display(), f.message)))?;
    let tokenizer = Tokenizer::load(&dir.join(TOKENIZER)).map_err(integrity)?;
    let bytes = read(MODEL)?;
    let file = SafeTensors::deserialize(&bytes).context(Class::Integrity, unreadable(MODEL))?;
    let mut reader = Reader::new(&file);
    let weights = reader.model(&plan(&config));
    let buffers = reader.model(&plan_buffers(&config));
    reader.finish(&dir.join(MODEL))?;
    if marker.model != model_hash(&config, &tokenizer, parts(&file)) {
        return Err(changed());
    }
    let decoder = Decoder::from_parts(config, weights, buffers);

    let trainer = if !trainer || marker.trainer.is_none() {
        None
    } else {
        let state = read(TRAINER)?;
        let bytes = read(OPTIMIZER)?;
        let file = SafeTensors::deserialize(&bytes).context(Class::Integrity, unreadable(OPTIMIZER))?;
        let mut reader = Reader::new(&file);
        let (m, v) = (reader.moments("m", &decoder.weights), reader.moments("v", &decoder.weights));
        reader.finish(&dir.join(OPTIMIZER))?;
        if marker.trainer != Some(trainer_hash(&String::from_utf8_lossy(&state), parts(&file))) {
            return Err(changed());
        }
        let state = serde_json::from_slice(&state).context(Class::Integrity, unreadable(TRAINER))?;
        Some(TrainerState { state, m, v })
    };
    let expected = Marker::new(marker.model, marker.trainer);
    if expected.hash != marker.hash {
        return Err(changed());
    }
    Ok(Checkpoint { decoder, tokenizer, hash: marker.hash, model_hash: expected.model, trainer })
}

/// The newest whole `step-N` folder in `checkpoints`. One that a killed save left half-written has another name, or no marker.
pub fn latest(checkpoints: &Path) -> Option<PathBuf> {
    let step = |path: &Path| path.file_name()?.to_str()?.strip_prefix("step-")?.parse::<u64>().ok();
    fs::read_dir(checkpoints)
        .ok()?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.join(MARKER).is_file())
        .filter_map(|path| Some((step(&path)?, path)))
        .max()
        .map(|(_, path)| path)
}

/// The checkpoint that `path` means: itself, or the newest of a run folder or of a folder of checkpoints.
///
/// # Errors
/// Usage, where there is none.
pub fn find(path: &Path) -> Result<PathBuf> {
    if path.join(MARKER).is_file() {
        return Ok(path.to_path_buf());
    }
    latest(path).or_else(|| latest(&path.join("checkpoints"))).ok_or_else(|| {
        Failure::new(Class::Usage, format!("There is no checkpoint in {}.", path.display()))
            .hint("Give a folder that `hone train` wrote: DIR, or DIR/checkpoints/step-N.")
    })
}

fn pretty(value: &impl Serialize) -> String {
    serde_json::to_string_pretty(value).expect("values of strings and numbers serialise") + "\n"
}

/// A tensor on its way to a file.
struct Stored<'a> {
    name: String,
    shape: Vec<usize>,
    /// As it lies in memory.
    data: &'a [f32],
    /// Whether the file has it transposed.
    transposed: bool,
}

impl View for Stored<'_> {
    fn dtype(&self) -> Dtype {
        Dtype::F32
    }
    fn shape(&self) -> &[usize] {
        &self.shape
    }
    fn data(&self) -> Cow<'_, [u8]> {
        let bytes = |data: &[f32]| data.iter().flat_map(|x| x.to_le_bytes()).collect();
        Cow::Owned(if self.transposed { bytes(&transposed(self.data, self.shape[0])) } else { bytes(self.data) })
    }
    fn data_len(&self) -> usize {
        size_of_val(self.data)
    }
}

/// Writes and syncs a file of tensors, one at a time: a checkpoint takes no second model in memory.
fn store(file: &Path, tensors: Vec<Stored>) -> std::io::Result<()> {
    // The library writes a file that nobody else may read and renames it; a plain one's permissions are put back.
    let permissions = File::create(file)?.metadata()?.permissions();
    // One metadata key at most: more would come in a random order.
    let format = HashMap::from([("format".to_string(), "pt".to_string())]);
    let named = tensors.into_iter().map(|t| (t.name.clone(), t));
    safetensors::serialize_to_file(named, Some(format), file).map_err(|e| match e {
        SafeTensorError::IoError(e) => e,
        e => std::io::Error::other(e),
    })?;
    fs::set_permissions(file, permissions)?;
    File::open(file)?.sync_all()
}

/// The name on disk of expert `e` of the tensor `…experts.w1.weight`.
fn expert_name(name: &str, e: usize) -> String {
    name.replacen(".experts.", &format!(".experts.{e}."), 1)
}

/// The transpose of a row-major `[rows, cols]`.
fn transposed(data: &[f32], cols: usize) -> Vec<f32> {
    let rows = data.len() / cols;
    let mut out = vec![0.0; data.len()];
    for (r, row) in data.chunks_exact(cols).enumerate() {
        for (c, &x) in row.iter().enumerate() {
            out[c * rows + r] = x;
        }
    }
    out
}

/// The tensors of `weights` as they lie on disk.
fn to_disk<'a>(plan: &[Planned], weights: &'a Weights) -> Vec<Stored<'a>> {
    let matrix = |name: String, data: &'a [f32], cols: usize| Stored {
        name,
        shape: vec![cols, data.len() / cols],
        data,
        transposed: true,
    };
    plan.iter()
        .zip(weights.iter())
        .flat_map(|(p, (_, t))| match p.layout {
            Layout::Same => {
                vec![Stored { name: p.name.clone(), shape: p.shape.clone(), data: t.data(), transposed: false }]
            }
            Layout::Transposed => vec![matrix(p.name.clone(), t.data(), t.cols())],
            Layout::Experts => {
                let each = t.data().chunks_exact(p.shape[1] * p.shape[2]).enumerate();
                each.map(|(e, data)| matrix(expert_name(&p.name, e), data, t.cols())).collect()
            }
        })
        .collect()
}

/// Takes tensors out of a file and notes all that does not fit.
struct Reader<'a> {
    unread: HashMap<String, safetensors::tensor::TensorView<'a>>,
    problems: Vec<String>,
}

impl<'a> Reader<'a> {
    fn new(file: &SafeTensors<'a>) -> Self {
        Self { unread: file.tensors().into_iter().collect(), problems: Vec::new() }
    }

    /// The f32 elements of `name`; zeros where it does not fit.
    fn take(&mut self, name: &str, shape: &[usize]) -> Vec<f32> {
        let problem = match self.unread.remove(name) {
            None => format!("missing: {name} {shape:?}"),
            Some(view) if view.shape() != shape => {
                format!("of another shape: {name} is {:?}, not {shape:?}", view.shape())
            }
            Some(view) => match to_f32(&view) {
                Ok(data) => return data,
                Err(e) => format!("of a type that cannot be read: {name} is {:?} ({e})", view.dtype()),
            },
        };
        self.problems.push(problem);
        vec![0.0; shape.iter().product()]
    }

    fn model(&mut self, plan: &[Planned]) -> Weights {
        let tensors = plan
            .iter()
            .map(|p| {
                let [rows, cols] = [p.shape[p.shape.len().saturating_sub(2)], p.shape[p.shape.len() - 1]];
                let data = match p.layout {
                    Layout::Same => self.take(&p.name, &p.shape),
                    Layout::Transposed => transposed(&self.take(&p.name, &[cols, rows]), rows),
                    Layout::Experts => (0..p.shape[0])
                        .flat_map(|e| transposed(&self.take(&expert_name(&p.name, e), &[cols, rows]), rows))
                        .collect(),
                };
                Tensor::from_vec(data, &p.shape)
            })
            .collect();
        gather(plan, tensors)
    }

    fn moments(&mut self, kind: &str, like: &Weights) -> Weights {
        let mut weights = like.zeros_like();
        for (name, tensor) in weights.iter_mut() {
            let shape = tensor.shape().to_vec();
            *tensor = Tensor::from_vec(self.take(&format!("{kind}.{name}"), &shape), &shape);
        }
        weights
    }

    fn finish(mut self, file: &Path) -> Result<()> {
        let mut unknown: Vec<String> = self.unread.keys().map(|name| format!("unknown: {name}")).collect();
        unknown.sort();
        self.problems.append(&mut unknown);
        if self.problems.is_empty() {
            return Ok(());
        }
        let message = format!("The tensors of {} do not fit its config: {}.", file.display(), self.problems.join("; "));
        Err(Failure::new(Class::Integrity, message).hint("Take config and weights from the same checkpoint."))
    }
}

fn parts(file: &SafeTensors) -> Vec<Part> {
    file.iter().map(|(name, view)| tensor_part(name, &view)).collect()
}

fn to_f32(view: &safetensors::tensor::TensorView) -> candle_core::Result<Vec<f32>> {
    if view.dtype() == Dtype::F32 {
        let (chunks, _) = view.data().as_chunks::<4>();
        return Ok(chunks.iter().map(|&b| f32::from_le_bytes(b)).collect());
    }
    let dtype = DType::try_from(view.dtype())?;
    candle_core::Tensor::from_raw_buffer(view.data(), dtype, view.shape(), &candle_core::Device::Cpu)?
        .to_dtype(DType::F32)?
        .flatten_all()?
        .to_vec1()
}

/// The hash of one named part.
type Part = (String, [u8; 32]);

fn tensor_part(name: &str, tensor: &impl View) -> Part {
    let head = format!("{:?} {:?} ", tensor.dtype(), tensor.shape());
    (name.to_string(), Sha256::new().chain_update(head).chain_update(tensor.data()).finalize().into())
}

fn text_part(name: &str, text: &str) -> Part {
    (name.to_string(), Sha256::digest(text).into())
}

/// The hash of parts, by name.
fn combined(mut parts: Vec<Part>) -> String {
    parts.sort();
    let mut hash = Sha256::new();
    for (name, part) in parts {
        hash.update(name);
        hash.update([0]);
        hash.update(part);
    }
    hex::encode(hash.finalize())
}

fn model_hash(config: &ModelConfig, tokenizer: &Tokenizer, mut tensors: Vec<Part>) -> String {
    // Checkpoints from before there was another dtype do not name it, and keep their hash.
    let said = pretty(config).replace(",\n  \"dtype\": \"f32\"", "");
    tensors.push(text_part(CONFIG, &said));
    tensors.push(text_part(TOKENIZER, &tokenizer.to_json()));
    combined(tensors)
}

fn trainer_hash(state: &str, mut tensors: Vec<Part>) -> String {
    tensors.push(text_part(TRAINER, state));
    combined(tensors)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Norm, Preset, Router};

    fn decoder() -> Decoder {
        let config = ModelConfig {
            hidden_size: 8,
            layers: 3,
            softmax_every: 2,
            head_dim: 4,
            rotary_dim: 2,
            qk_norm: true,
            intermediate_size: 6,
            experts: 3,
            router: Router::SigmoidBias,
            ..Preset::HybridTiny.config(5)
        };
        let mut decoder = Decoder::new(config, 1).unwrap();
        decoder.buffers.iter_mut().for_each(|(_, b)| b.fill(0.25));
        decoder
    }

    fn tokenizer() -> Tokenizer {
        Tokenizer::chars(["01+="]).unwrap()
    }

    #[test]
    fn what_is_saved_is_loaded_bit_for_bit() {
        let dir = tempfile::tempdir().unwrap();
        let decoder = decoder();
        let (mut m, mut v) = (decoder.weights.zeros_like(), decoder.weights.zeros_like());
        m.iter_mut().enumerate().for_each(|(i, (_, t))| t.fill(i as f32 - 0.5));
        v.iter_mut().enumerate().for_each(|(i, (_, t))| t.fill(i as f32 * 1e-30));
        let state = serde_json::json!({"step": 7, "z": [0.1, 1e-17], "a": "x"});
        let path = dir.path().join("checkpoints/step-7");
        let hash = save(&path, &decoder, &tokenizer(), Some((&state, &m, &v))).unwrap();
        let loaded = load(&path, true).unwrap();
        assert_eq!(loaded.hash, hash);
        assert_eq!(loaded.decoder.weights, decoder.weights);
        assert_eq!(loaded.decoder.buffers, decoder.buffers);
        assert_eq!(loaded.decoder.config, decoder.config);
        assert_eq!(loaded.tokenizer, tokenizer());
        assert_eq!(loaded.trainer, Some(TrainerState { state: state.clone(), m, v: v.clone() }));
        assert_eq!(load(&path, false).unwrap().trainer, None);

        // The same content has the same hash; another trainer's state changes it, but not the model's.
        let again = dir.path().join("again");
        assert_eq!(save(&again, &decoder, &tokenizer(), Some((&state, &loaded.trainer.unwrap().m, &v))).unwrap(), hash);
        assert_ne!(save(&again, &decoder, &tokenizer(), None).unwrap(), hash);
        assert_eq!(load(&again, false).unwrap().model_hash, loaded.model_hash);
        let mut other = decoder;
        other.config.rope_theta = 500.0;
        save(&again, &other, &tokenizer(), None).unwrap();
        assert_ne!(load(&again, false).unwrap().model_hash, loaded.model_hash);
    }

    #[test]
    fn files_lie_as_hugging_face_has_them() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("step-1");
        let decoder = decoder();
        save(&path, &decoder, &tokenizer(), None).unwrap();
        let bytes = fs::read(path.join(MODEL)).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let view = file.tensor("model.layers.1.block_sparse_moe.experts.2.w1.weight").unwrap();
        assert_eq!(view.shape(), [6, 8], "[out, in]");
        let inside = decoder.weights.get("model.layers.1.block_sparse_moe.experts.w1.weight").unwrap();
        assert_eq!(to_f32(&view).unwrap()[3 * 8 + 5], inside.data()[2 * 48 + 5 * 6 + 3]);
        assert_eq!(file.tensor("lm_head.weight").unwrap().shape(), [5, 8]);
        assert_eq!(file.tensor("model.layers.0.self_attn.qkv_proj.weight").unwrap().shape(), [3 * 8, 8]);
        assert_eq!(file.tensor("model.layers.1.self_attn.k_norm.weight").unwrap().shape(), [4]);
        assert!(file.tensor("model.layers.2.block_sparse_moe.e_score_correction_bias").is_ok());
        let config: serde_json::Value = serde_json::from_slice(&fs::read(path.join(CONFIG)).unwrap()).unwrap();
        assert_eq!(config["model_type"], "hone");
        assert_eq!(config["attn_type_list"], serde_json::json!([0, 1, 0]));
        assert_eq!((&config["num_local_experts"], &config["eos_token_id"]), (&3.into(), &4.into()));
    }

    #[test]
    fn all_that_does_not_fit_is_listed_at_once() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("step-1");
        let decoder = decoder();
        save(&path, &decoder, &tokenizer(), None).unwrap();
        let mut tensors = to_disk(&plan(&decoder.config), &decoder.weights);
        tensors.retain(|t| t.name != "lm_head.weight");
        tensors[0].name = "model.embed.weight".into();
        tensors[1].shape.push(1);
        store(&path.join(MODEL), tensors).unwrap();
        let failure = load(&path, false).unwrap_err();
        assert_eq!(failure.class, Class::Integrity);
        for part in [
            "missing: lm_head.weight [5, 8]",
            "missing: model.embed_tokens.weight",
            "unknown: model.embed.weight",
            "of another shape: model.layers.0.",
            "missing: model.layers.2.block_sparse_moe.e_score_correction_bias",
        ] {
            assert!(failure.message.contains(part), "{part}: {failure}");
        }
    }

    #[test]
    fn damage_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("step-1");
        let decoder = decoder();
        let moments = decoder.weights.zeros_like();
        save(&path, &decoder, &tokenizer(), Some((&serde_json::json!({"step": 1}), &moments, &moments))).unwrap();
        let whole = fs::read(path.join(MODEL)).unwrap();
        for len in [0, 4, 100, whole.len() - 1] {
            fs::write(path.join(MODEL), &whole[..len]).unwrap();
            assert_eq!(load(&path, false).unwrap_err().class, Class::Integrity, "truncated to {len}");
        }
        // In the header: its length, its JSON, a tensor's name.
        for at in [0, 8, whole.windows(7).position(|w| w == b"lm_head").unwrap()] {
            let mut header = whole.clone();
            header[at] ^= 1;
            fs::write(path.join(MODEL), header).unwrap();
            assert_eq!(load(&path, false).unwrap_err().class, Class::Integrity, "byte {at}");
        }
        let mut flipped = whole.clone();
        *flipped.last_mut().unwrap() ^= 1;
        fs::write(path.join(MODEL), flipped).unwrap();
        assert_eq!(load(&path, false).unwrap_err().class, Class::Integrity);
        fs::write(path.join(MODEL), whole).unwrap();
        fs::write(path.join(TRAINER), "{\"step\": 2}").unwrap();
        assert_eq!(load(&path, true).unwrap_err().class, Class::Integrity);
        assert!(load(&path, false).is_ok(), "the model alone is whole");
    }

    #[test]
    fn a_lost_file_is_damage_and_a_lost_marker_no_checkpoint() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("step-1");
        for name in [CONFIG, MODEL, TOKENIZER] {
            save(&path, &decoder(), &tokenizer(), None).unwrap();
            fs::remove_file(path.join(name)).unwrap();
            let failure = load(&path, false).unwrap_err();
            assert_eq!(failure.class, Class::Integrity, "{failure}");
            assert!(failure.message.contains(name), "{failure}");
        }
        save(&path, &decoder(), &tokenizer(), None).unwrap();
        fs::write(path.join(CONFIG), "{\"hone\": {}}").unwrap();
        assert_eq!(load(&path, false).unwrap_err().class, Class::Integrity);
        fs::remove_file(path.join(MARKER)).unwrap();
        assert_eq!(load(&path, false).unwrap_err().class, Class::Usage);
        assert_eq!(load(&dir.path().join("none"), false).unwrap_err().class, Class::Usage);
    }

    #[test]
    fn a_checkpoint_that_names_no_dtype_is_whole_and_f32() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("step-1");
        save(&path, &decoder(), &tokenizer(), None).unwrap();
        let mut said: serde_json::Value = serde_json::from_slice(&fs::read(path.join(CONFIG)).unwrap()).unwrap();
        said["hone"].as_object_mut().unwrap().shift_remove("dtype").unwrap();
        fs::write(path.join(CONFIG), said.to_string()).unwrap();
        assert_eq!(load(&path, false).unwrap().decoder.config.dtype, crate::config::Dtype::F32);
        said["hone"]["dtype"] = "bf16".into();
        fs::write(path.join(CONFIG), said.to_string()).unwrap();
        assert_eq!(load(&path, false).unwrap_err().class, Class::Integrity);
    }

    #[test]
    fn only_whole_checkpoints_are_found() {
        let dir = tempfile::tempdir().unwrap();
        let checkpoints = dir.path().join("checkpoints");
        assert_eq!(latest(&checkpoints), None);
        assert_eq!(find(dir.path()).unwrap_err().class, Class::Usage);
        for step in [9, 10] {
            save(&checkpoints.join(format!("step-{step}")), &decoder(), &tokenizer(), None).unwrap();
        }
        // What a save killed before its rename leaves, and one whose last file never came.
        fs::create_dir(checkpoints.join(".step-11.tmp")).unwrap();
        fs::write(checkpoints.join(".step-11.tmp").join(MARKER), "{}").unwrap();
        fs::create_dir(checkpoints.join("step-12")).unwrap();
        fs::write(checkpoints.join("step-12").join(MODEL), "half").unwrap();
        assert_eq!(latest(&checkpoints), Some(checkpoints.join("step-10")));
        assert_eq!(find(dir.path()).unwrap(), checkpoints.join("step-10"));
        assert_eq!(find(&checkpoints.join("step-9")).unwrap(), checkpoints.join("step-9"));
        // The next save of that step clears the leftover away.
        save(&checkpoints.join("step-11"), &decoder(), &tokenizer(), None).unwrap();
        assert!(!checkpoints.join(".step-11.tmp").exists());
        assert_eq!(latest(&checkpoints), Some(checkpoints.join("step-11")));
    }

    #[test]
    fn a_model_type_is_named_only_where_it_is_true() {
        let tiny = Preset::HybridTiny.config(5);
        let kind = |config: &ModelConfig| hugging_face::config(config, 4)["model_type"].clone();
        assert_eq!(kind(&tiny), "hone");
        let norm = Norm::Post { alpha: 2.0, beta: 1.0 };
        assert_eq!(kind(&ModelConfig { norm, rotary_dim: tiny.head_dim, ..tiny.clone() }), "minimax");
        let m2 = ModelConfig { softmax_every: 1, qk_norm: true, router: Router::SigmoidBias, ..tiny };
        assert_eq!(kind(&m2), "minimax_m2");
    }
}
