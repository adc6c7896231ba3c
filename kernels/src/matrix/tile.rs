//! The loops of a product on one thread: blocks of the right factor are laid out in panels, a few rows of the left one in a
//! tile, and a tile meets a panel in registers. Few rows meet the right factor where it lies instead.

use super::lanes::{DEPTH, LINE, Lanes, MOST_ROWS, WIDE, copy};
use super::{Matrix, Out, Write};
use bytemuck::Zeroable;

/// Columns of the right factor in panels at a time: with [`DEPTH`] lanes of each, half a second-level cache of present processors.
const BLOCK: usize = 256;

/// Lanes between panels, so that those written side by side do not share cache sets.
const GAP: usize = 32;

/// Up to so many rows, laying out the right factor would cost more than it gives.
const FEW: usize = 8;

/// Lanes of the inner dimension that few rows take at a time: each sum is read and written once for so many.
const GROUP: usize = 8;

/// Lanes of the widest panel.
const WIDEST: usize = 32;

/// Tiles laid out at a time: a transposed factor's lines are then read by whole cache lines.
const TILES: usize = 4;

/// Floats of memory that [`product`] works in.
pub(super) fn memory(a: Matrix, b: Matrix) -> usize {
    let columns = b.cols().next_multiple_of(WIDEST);
    let panels = columns.min(BLOCK) * a.cols().min(DEPTH) + BLOCK / WIDE * GAP;
    panels.max(FEW * columns) + TILES * MOST_ROWS * LINE
}

/// The product of all rows of `a` and all columns of `b` into `out`. `memory` is as large as [`memory`] says.
#[inline(always)]
pub(super) fn product<K: Lanes>(k: K, a: Matrix, b: Matrix, write: Write, out: &mut Out, memory: &mut [f32]) {
    if a.cols() == 0 {
        if write == Write::Over {
            (0..a.rows()).for_each(|r| out.row(r).fill(0.0));
        }
        return;
    }
    let (tile, memory) = memory.split_at_mut(TILES * MOST_ROWS * LINE);
    let tile: &mut [K::Lane] = bytemuck::cast_slice_mut(tile);
    let (tile, _) = tile.as_chunks_mut::<LINE>();
    if a.rows() <= FEW && !b.transposed && (K::ELEMENTS == 1 || b.pairs.is_some()) {
        few_rows(k, a, b, write, out, tile, memory);
    } else {
        many_rows(k, a, b, write, out, tile, bytemuck::cast_slice_mut(memory));
    }
}

/// Elements of the inner dimension that are summed in one piece, as ranges.
fn pieces<K: Lanes>(inner: usize) -> impl Iterator<Item = (usize, usize)> {
    let step = DEPTH * K::ELEMENTS;
    (0..inner).step_by(step).map(move |from| (from, inner.min(from + step)))
}

#[inline(always)]
fn many_rows<K: Lanes>(
    k: K,
    a: Matrix,
    b: Matrix,
    write: Write,
    out: &mut Out,
    tile: &mut [[K::Lane; LINE]],
    packed: &mut [K::Lane],
) {
    let (rows, columns, inner) = (a.rows(), b.cols(), a.cols());
    let panel = WIDE * K::WIDTH;
    let tiles = rows.div_ceil(K::ROWS);
    for (from, to) in pieces::<K>(inner) {
        let len = (to - from).div_ceil(K::ELEMENTS);
        let add = from > 0 || write == Write::Add;
        for left in (0..columns).step_by(BLOCK) {
            let right = columns.min(left + BLOCK);
            pack(k, b, from, to, left, right, packed);
            // Tiles of nearly one height, so that none is a mere remainder.
            let edge = |t: usize| rows * t.min(tiles) / tiles;
            for t in 0..tiles {
                let (top, bottom) = (edge(t), edge(t + 1));
                let first = top - edge(t / TILES * TILES);
                if first == 0 {
                    fill(k, a, top, edge(t + TILES), from, to, tile);
                }
                let tile = &tile[first..];
                for (at, panel_of) in (left..right).step_by(panel).zip(packed.chunks(len * panel + GAP)) {
                    let place = (top, at, right.min(at + panel));
                    meet(k, bottom - top, tile, &panel_of[..len * panel], out, place, add);
                }
            }
        }
    }
}

/// Lays `b[from..to, left..right]` out in panels of `[lanes, panel]`; columns that are not there become 0.
#[inline(always)]
fn pack<K: Lanes>(k: K, b: Matrix, from: usize, to: usize, left: usize, right: usize, out: &mut [K::Lane]) {
    let panel = WIDE * K::WIDTH;
    let len = (to - from).div_ceil(K::ELEMENTS);
    if b.transposed {
        for (at, out) in (left..right).step_by(panel).zip(out.chunks_mut(len * panel + GAP)) {
            for first in (0..panel).step_by(16) {
                let wide = 16.min(panel - first); // a panel of narrow registers is less than a block
                let columns = right.saturating_sub(at + first).min(wide);
                for lane in (0..len).step_by(16) {
                    let begin = from + lane * K::ELEMENTS;
                    let block = block_of(k, b, at + first, columns, begin, to.min(begin + 16 * K::ELEMENTS));
                    for (out, block) in out[lane * panel..len * panel].chunks_exact_mut(panel).zip(&block) {
                        copy(&block[..wide], &mut out[first..first + wide]);
                    }
                }
            }
        }
        return;
    }
    // Line after line, as they lie in memory.
    for lane in 0..len {
        let at = from + lane * K::ELEMENTS;
        let second = (K::ELEMENTS == 2 && at + 1 < to).then(|| b.line(at + 1));
        let stored = b.pairs.and_then(K::stored).map(|pairs| &pairs[at / 2 * b.stride..][..b.width]);
        for (p, begin) in (left..right).step_by(panel).enumerate() {
            let end = right.min(begin + panel);
            let out = &mut out[p * (len * panel + GAP) + lane * panel..][..panel];
            let (out, rest) = out.split_at_mut(end - begin);
            rest.fill(K::Lane::zeroed());
            match stored {
                Some(pairs) => copy(&pairs[begin..end], out),
                None => k.across(&b.line(at)[begin..end], second.map(|y| &y[begin..end]), out),
            }
        }
    }
}

/// Rows `top..bottom` of `a`, elements `from..to` of each, as rows of lanes.
#[inline(always)]
fn fill<K: Lanes>(k: K, a: Matrix, top: usize, bottom: usize, from: usize, to: usize, tile: &mut [[K::Lane; LINE]]) {
    let len = (to - from).div_ceil(K::ELEMENTS);
    if !a.transposed {
        for (i, tile) in (top..bottom).zip(tile) {
            k.along(&a.line(i)[from..to], &mut tile[..len]);
        }
        return;
    }
    for lane in (0..len).step_by(16) {
        for (first, tile) in (top..bottom).step_by(16).zip(tile.chunks_mut(16)) {
            let last = bottom.min(first + 16);
            let mut block = [[K::Lane::zeroed(); 16]; 16];
            // With sizes that the compiler knows, a whole block stays in registers.
            if last == first + 16 && from + (lane + 16) * K::ELEMENTS <= to {
                for i in 0..16 {
                    let at = from + (lane + i) * K::ELEMENTS;
                    let second = (K::ELEMENTS == 2).then(|| &a.line(at + 1)[first..first + 16]);
                    k.across(&a.line(at)[first..first + 16], second, &mut block[i]);
                }
            } else {
                for (i, block) in block.iter_mut().enumerate().take(16.min(len - lane)) {
                    let at = from + (lane + i) * K::ELEMENTS;
                    let second = (K::ELEMENTS == 2 && at + 1 < to).then(|| &a.line(at + 1)[first..last]);
                    k.across(&a.line(at)[first..last], second, &mut block[..last - first]);
                }
            }
            k.transpose(&mut block);
            for (tile, block) in tile.iter_mut().zip(&block[..last - first]) {
                tile[lane..lane + 16].copy_from_slice(block); // LINE has room past DEPTH
            }
        }
    }
}

/// Up to 16 lanes of `lines` stored lines (columns of a transposed factor) from line `first` on, elements `from..to`: `[lanes, lines]`.
#[inline(always)]
fn block_of<K: Lanes>(k: K, b: Matrix, first: usize, lines: usize, from: usize, to: usize) -> [[K::Lane; 16]; 16] {
    let mut block = [[K::Lane::zeroed(); 16]; 16];
    if lines == 16 && to - from == 16 * K::ELEMENTS {
        for i in 0..16 {
            k.along(&b.line(first + i)[from..from + 16 * K::ELEMENTS], &mut block[i]);
        }
    } else {
        for (i, block) in block.iter_mut().enumerate().take(lines) {
            k.along(&b.line(first + i)[from..to], &mut block[..(to - from).div_ceil(K::ELEMENTS)]);
        }
    }
    k.transpose(&mut block);
    block
}

/// Sums of `rows` rows of the tile with all of a panel go to `place`: its first row, its first column and the one past its last.
#[inline(always)]
fn meet<K: Lanes>(
    k: K,
    rows: usize,
    tile: &[[K::Lane; LINE]],
    panel: &[K::Lane],
    out: &mut Out,
    place: (usize, usize, usize),
    add: bool,
) {
    match rows {
        1 => meet_rows::<K, 1>(k, tile, panel, out, place, add),
        2 => meet_rows::<K, 2>(k, tile, panel, out, place, add),
        3 => meet_rows::<K, 3>(k, tile, panel, out, place, add),
        4 => meet_rows::<K, 4>(k, tile, panel, out, place, add),
        5 => meet_rows::<K, 5>(k, tile, panel, out, place, add),
        6 => meet_rows::<K, 6>(k, tile, panel, out, place, add),
        7 => meet_rows::<K, 7>(k, tile, panel, out, place, add),
        8 => meet_rows::<K, 8>(k, tile, panel, out, place, add),
        9 => meet_rows::<K, 9>(k, tile, panel, out, place, add),
        10 => meet_rows::<K, 10>(k, tile, panel, out, place, add),
        11 => meet_rows::<K, 11>(k, tile, panel, out, place, add),
        _ => meet_rows::<K, 12>(k, tile, panel, out, place, add),
    }
}

#[inline(always)]
fn meet_rows<K: Lanes, const R: usize>(
    k: K,
    tile: &[[K::Lane; LINE]],
    panel: &[K::Lane],
    out: &mut Out,
    (top, left, right): (usize, usize, usize),
    add: bool,
) {
    let tile: &[[K::Lane; LINE]; R] = tile.first_chunk().expect("R rows");
    let mut sums = [[k.zero(); WIDE]; R];
    for (l, panel) in panel.chunks_exact(WIDE * K::WIDTH).enumerate().take(DEPTH) {
        let mut registers = [k.zero_lanes(); WIDE];
        for c in 0..WIDE {
            registers[c] = k.load(&panel[c * K::WIDTH..(c + 1) * K::WIDTH]);
        }
        for r in 0..R {
            for c in 0..WIDE {
                sums[r][c] = k.step(tile[r][l], registers[c], sums[r][c]);
            }
        }
    }
    if right == left + WIDE * K::WIDTH {
        for r in 0..R {
            let out = &mut out.row(top + r)[left..left + WIDE * K::WIDTH];
            for c in 0..WIDE {
                k.store(sums[r][c], &mut out[c * K::WIDTH..(c + 1) * K::WIDTH], add);
            }
        }
        return;
    }
    for (r, sums) in sums.into_iter().enumerate() {
        let mut out = &mut out.row(top + r)[left..right];
        for sums in sums {
            let (here, rest) = out.split_at_mut(out.len().min(K::WIDTH));
            k.store(sums, here, add);
            out = rest;
        }
    }
}

/// At most [`FEW`] rows: the right factor is read once, where it lies, line after line.
#[inline(always)]
fn few_rows<K: Lanes>(
    k: K,
    a: Matrix,
    b: Matrix,
    write: Write,
    out: &mut Out,
    tile: &mut [[K::Lane; LINE]],
    sums: &mut [f32],
) {
    let (rows, columns, inner) = (a.rows(), b.cols(), a.cols());
    let stride = columns.next_multiple_of(K::WIDTH);
    for (from, to) in pieces::<K>(inner) {
        fill(k, a, 0, rows, from, to, tile);
        let len = (to - from).div_ceil(K::ELEMENTS);
        let mut lane = 0;
        while lane < len {
            let at = from + lane * K::ELEMENTS;
            if lane + GROUP <= len {
                group_of::<K, GROUP>(k, rows, tile, b, at, lane, sums, stride);
                lane += GROUP;
            } else {
                group_of::<K, 1>(k, rows, tile, b, at, lane, sums, stride);
                lane += 1;
            }
        }
        let add = from > 0 || write == Write::Add;
        for (r, sums) in sums.chunks(stride).enumerate().take(rows) {
            for (out, sum) in out.row(r).iter_mut().zip(sums) {
                *out = if add { *out + sum } else { *sum };
            }
        }
    }
}

#[inline(always)]
fn group_of<K: Lanes, const G: usize>(
    k: K,
    rows: usize,
    tile: &[[K::Lane; LINE]],
    b: Matrix,
    at: usize,
    lane: usize,
    sums: &mut [f32],
    stride: usize,
) {
    match rows {
        1 => group::<K, 1, G>(k, tile, b, at, lane, sums, stride),
        2 => group::<K, 2, G>(k, tile, b, at, lane, sums, stride),
        3 => group::<K, 3, G>(k, tile, b, at, lane, sums, stride),
        4 => group::<K, 4, G>(k, tile, b, at, lane, sums, stride),
        5 => group::<K, 5, G>(k, tile, b, at, lane, sums, stride),
        6 => group::<K, 6, G>(k, tile, b, at, lane, sums, stride),
        7 => group::<K, 7, G>(k, tile, b, at, lane, sums, stride),
        _ => group::<K, 8, G>(k, tile, b, at, lane, sums, stride),
    }
}

/// `R` rows take in `G` lanes of `b` from element `at` of the inner dimension on, which are the lanes from `lane` on of the tile. Sums
/// begin at lane 0 and lie in memory between groups.
#[inline(always)]
fn group<K: Lanes, const R: usize, const G: usize>(
    k: K,
    tile: &[[K::Lane; LINE]],
    b: Matrix,
    at: usize,
    lane: usize,
    sums: &mut [f32],
    stride: usize,
) {
    let (columns, b_stride) = (b.cols(), b.stride);
    let mut a = [[K::Lane::zeroed(); G]; R];
    let mut lines: [&[K::Lane]; G] = [&[]; G];
    for g in 0..G {
        lines[g] = match b.pairs.and_then(K::stored) {
            Some(pairs) => &pairs[(at / 2 + g) * b.stride..][..columns],
            // A lane of one element: its line as it lies.
            None => bytemuck::cast_slice(b.line(at + g)),
        };
        for r in 0..R {
            a[r][g] = tile[r][lane + g];
        }
    }
    let mut at = 0;
    while at + WIDE * K::WIDTH <= columns {
        let mut b = [[k.zero_lanes(); WIDE]; G];
        for g in 0..G {
            for c in 0..WIDE {
                b[g][c] = k.load(&lines[g][at + c * K::WIDTH..][..K::WIDTH]);
                // The same columns of the lines that the next group takes.
                prefetch(lines[g].as_ptr().wrapping_add(G * b_stride + at + c * K::WIDTH));
            }
        }
        for r in 0..R {
            let place = &mut sums[r * stride + at..][..WIDE * K::WIDTH];
            let mut sum = [k.zero(); WIDE];
            for c in 0..WIDE {
                if lane > 0 {
                    sum[c] = k.sums(&place[c * K::WIDTH..][..K::WIDTH]);
                }
            }
            for g in 0..G {
                for c in 0..WIDE {
                    sum[c] = k.step(a[r][g], b[g][c], sum[c]);
                }
            }
            for c in 0..WIDE {
                k.store(sum[c], &mut place[c * K::WIDTH..][..K::WIDTH], false);
            }
        }
        at += WIDE * K::WIDTH;
    }
    while at < columns {
        let to = columns.min(at + K::WIDTH);
        let mut b = [k.zero_lanes(); G];
        for g in 0..G {
            b[g] = if to == at + K::WIDTH { k.load(&lines[g][at..to]) } else { k.load_part(&lines[g][at..to]) };
        }
        for r in 0..R {
            let place = &mut sums[r * stride + at..][..K::WIDTH];
            let mut sum = if lane == 0 { k.zero() } else { k.sums(place) };
            for g in 0..G {
                sum = k.step(a[r][g], b[g], sum);
            }
            k.store(sum, place, false);
        }
        at += K::WIDTH;
    }
}

/// Asks for memory that is read soon; any address will do.
#[inline(always)]
fn prefetch<T>(place: *const T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch reads nothing that could fault, and every x86-64 has it.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(place.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = place;
}
