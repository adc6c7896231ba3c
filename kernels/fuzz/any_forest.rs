//! Forests from any bytes, and what must hold of each. Shared by the fuzz target and the property test.

use hone_kernels::{Forest, Prediction, Segment, Tensor, head, lightning, softmax};

/// Forests of more rows are checked, but not computed with.
const SMALL: usize = 256;

/// Reads `bytes` as a forest and panics unless it is taken exactly where it is well formed, the first malformed segment is the
/// one blamed otherwise, and attention and head compute finite numbers over it.
pub fn check(bytes: &[u8]) {
    let (rows, segments) = read(bytes);
    let tokens = vec![0; rows];
    let malformed = (0..segments.len()).find(|&i| !well_formed(rows, &segments, i));
    match Forest::new(tokens, segments.clone()) {
        Ok(forest) => {
            assert_eq!(malformed, None, "{segments:?}");
            assert_eq!(segments.iter().map(|s| s.len).sum::<usize>(), rows, "no token is left over");
            if rows <= SMALL {
                compute(&forest);
            }
        }
        Err(error) => {
            assert_eq!(error.segment, malformed.unwrap_or(segments.len()), "{error}: {segments:?}");
            assert!(!error.fault.is_empty());
        }
    }
}

/// Four bytes a segment, so chosen that most fields fit and a few lie at the ends of their types. The first byte says how many tokens
/// are left over or missing.
fn read(bytes: &[u8]) -> (usize, Vec<Segment>) {
    let (first, bytes) = bytes.split_first().unwrap_or((&0, &[]));
    let mut end = 0usize;
    let mut segments = Vec::new();
    for fields in bytes.chunks_exact(4) {
        let [start, len, parent, uses] = [fields[0], fields[1], fields[2], fields[3]];
        let near_the_end = |byte: u8| usize::MAX - usize::from(u8::MAX - byte);
        let segment = Segment {
            start: match start {
                0..240 => end,
                240..248 => end.wrapping_add(usize::from(start)).wrapping_sub(244),
                _ => near_the_end(start),
            },
            len: match len {
                0..248 => usize::from(len % 20),
                _ => near_the_end(len),
            },
            parent: match parent {
                0..80 => None,
                80..240 => Some(segments.len().wrapping_sub(1 + usize::from(parent % 4))),
                240..250 => Some(usize::from(parent - 240)),
                _ => Some(near_the_end(parent)),
            },
            uses: match uses {
                u8::MAX => u32::MAX,
                _ => uses.into(),
            },
        };
        end = end.wrapping_add(segment.len);
        segments.push(segment);
    }
    let rows = end.min(64 * 1024);
    (if *first < 240 { rows } else { (rows + usize::from(*first)).saturating_sub(248) }, segments)
}

/// Whether segment `i` is well formed, where all before it are.
fn well_formed(rows: usize, segments: &[Segment], i: usize) -> bool {
    let s = &segments[i];
    let end = if i == 0 { 0 } else { segments[i - 1].start + segments[i - 1].len };
    let tiles = s.start == end && s.len > 0 && s.len <= rows - end;
    // The segment before, or one that it continues.
    let mut above = i.checked_sub(1);
    while above.is_some() && above != s.parent {
        above = segments[above.expect("just seen")].parent;
    }
    tiles && s.uses > 0 && (s.parent.is_none() || above.is_some())
}

/// Runs what reads forests over this one.
fn compute(forest: &Forest) {
    let rows = forest.rows();
    let tensor = |of: usize, shape: &[usize]| {
        let number = |i: usize| ((i + 1) * (2 * of + 7919) % 199) as f32 / 100.0 - 1.0;
        Tensor::from_vec((0..shape.iter().product()).map(number).collect(), shape)
    };
    let [q, d_out] = [1, 2].map(|of| tensor(of, &[rows, 6]));
    let [mut out, mut lse, mut dq, mut dk, mut dv] = [(); 5].map(|()| Tensor::default());

    let [k, v] = [3, 4].map(|of| tensor(of, &[rows, 6]));
    let shape = lightning::Heads { head_dim: 3, slopes: lightning::slopes(2, 0, 2), block: 5 };
    let mut finals = Vec::new();
    lightning::forward(&shape, forest, &q, &k, &v, &mut out, Some(&mut finals));
    lightning::backward(&shape, forest, &q, &k, &v, &d_out, &mut dq, &mut dk, &mut dv);
    assert_finite(&[&out, &dq, &dk, &dv]);
    assert!(finals.len() == forest.segments().len() && finals.iter().flatten().all(|x| x.is_finite()));

    let [k, v] = [3, 4].map(|of| tensor(of, &[rows, 3]));
    let shape = softmax::Heads { heads: 2, kv_heads: 1, head_dim: 3, scale: 0.5 };
    softmax::forward(shape, forest, &q, &k, &v, &mut out, &mut lse);
    softmax::backward(shape, forest, &q, &k, &v, &out, &lse, &d_out, &mut dq, &mut dk, &mut dv);
    assert_finite(&[&out, &lse, &dq, &dk, &dv]);

    let vocabulary = tensor(5, &[6, 21]);
    let predictions: Vec<_> =
        (0..rows as u32).filter(|row| row % 3 != 1).map(|row| Prediction { row, target: row * 5 % 21 }).collect();
    let mut scores = head::Scores::default();
    head::forward(&out, &vocabulary, &predictions, 1.0, 4, &mut scores);
    assert_eq!(scores.top.len(), 4 * predictions.len());
    let listed = scores.top.iter().map(|(_, logprob)| logprob);
    assert!(scores.logprob.iter().chain(&scores.entropy).chain(listed).all(|x| x.is_finite()));
}

fn assert_finite(tensors: &[&Tensor]) {
    assert!(tensors.iter().all(|t| t.data().iter().all(|x| x.is_finite())));
}
