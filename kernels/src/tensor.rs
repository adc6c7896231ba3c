//! The thin tensor: a shape and row-major storage on the host. It computes nothing; operations are modules.

use crate::matrix::pair;

/// The numbers that products multiply; they always add in f32.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Dtype {
    /// 32 bits.
    #[default]
    F32,
    /// Rounded to bfloat16 where the processor multiplies it (AVX512-BF16); f32 elsewhere.
    Bf16,
}

/// A dense row-major f32 tensor. Products with a weight or into a weight's gradient run in its [`Dtype`]; a weight may
/// keep its elements rounded beside them, so that decoding reads half the bytes.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct Tensor {
    shape: Vec<usize>,
    data: Vec<f32>,
    dtype: Dtype,
    /// Each matrix `[in, out]` of the tensor as `[in / 2, out]` pairs of bf16; empty where there are none.
    pairs: Vec<u32>,
}

impl Tensor {
    /// A tensor of zeros.
    pub fn zeros(shape: &[usize]) -> Self {
        Self { shape: shape.to_vec(), data: vec![0.0; shape.iter().product()], ..Self::default() }
    }

    /// Takes `data` as it lies. Panics if its length is not the product of `shape`: a programmer's error.
    pub fn from_vec(data: Vec<f32>, shape: &[usize]) -> Self {
        assert_eq!(data.len(), shape.iter().product::<usize>(), "shape {shape:?} does not fit the data");
        Self { shape: shape.to_vec(), data, ..Self::default() }
    }

    /// The shape, outermost first.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Product of all dimensions but the last (1 for a vector).
    pub fn rows(&self) -> usize {
        self.shape[..self.shape.len().saturating_sub(1)].iter().product()
    }

    /// The last dimension.
    pub fn cols(&self) -> usize {
        self.shape.last().copied().unwrap_or(0)
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.data.len()
    }

    /// True where there are no elements.
    pub fn is_empty(&self) -> bool {
        self.data.is_empty()
    }

    /// The elements, row-major.
    pub fn data(&self) -> &[f32] {
        &self.data
    }

    /// The elements, row-major, mutable. Rounded ones are forgotten: [`Self::round`] makes them anew.
    pub fn data_mut(&mut self) -> &mut [f32] {
        self.pairs.clear();
        &mut self.data
    }

    /// What products with this tensor multiply.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Sets what products with this tensor multiply.
    pub fn set_dtype(&mut self, dtype: Dtype) {
        self.dtype = dtype;
        self.pairs.clear();
    }

    /// Keeps the elements of a bf16 tensor of matrices rounded beside them; nothing else has them.
    pub fn round(&mut self) {
        self.pairs.clear();
        let [.., rows, cols] = self.shape[..] else { return };
        if self.dtype == Dtype::F32 || !crate::bf16_available() || self.data.is_empty() {
            return;
        }
        self.pairs.reserve_exact(self.data.len() / (rows * cols) * rows.div_ceil(2) * cols);
        for matrix in self.data.chunks_exact(rows * cols) {
            for two in matrix.chunks(2 * cols) {
                let (first, second) = two.split_at(cols);
                match second {
                    [] => self.pairs.extend(first.iter().map(|&x| pair(x, 0.0))),
                    second => self.pairs.extend(first.iter().zip(second).map(|(&x, &y)| pair(x, y))),
                }
            }
        }
    }

    /// Elements, their rounded pairs and the width of a line, for writing, where the pairs are kept and no line is without another.
    pub(crate) fn with_pairs_mut(&mut self) -> Option<(&mut [f32], &mut [u32], usize)> {
        let [.., rows, cols] = self.shape[..] else { return None };
        let kept = rows % 2 == 0 && !self.pairs.is_empty();
        kept.then_some((&mut self.data[..], &mut self.pairs[..], cols))
    }

    /// The rounded pairs of matrix `i` of the stack that this tensor is, `[in / 2, out]`, where they are kept.
    pub(crate) fn pairs_of(&self, i: usize) -> Option<&[u32]> {
        let [.., rows, cols] = self.shape[..] else { return None };
        let len = rows.div_ceil(2) * cols;
        self.pairs.get(i * len..(i + 1) * len).filter(|pairs| !pairs.is_empty())
    }

    /// Row `i` of the matrix of [`Self::rows`] × [`Self::cols`].
    pub fn row(&self, i: usize) -> &[f32] {
        let c = self.cols();
        &self.data[i * c..(i + 1) * c]
    }

    /// Row `i`, mutable.
    pub fn row_mut(&mut self, i: usize) -> &mut [f32] {
        let c = self.cols();
        &mut self.data_mut()[i * c..(i + 1) * c]
    }

    /// Gives the tensor another shape, keeping its allocation where it suffices. It grows to the size asked for and no further, so
    /// that a plan of the largest batch is the memory it takes. Contents are unspecified after.
    pub fn resize(&mut self, shape: &[usize]) {
        self.shape.clear();
        self.shape.extend_from_slice(shape);
        self.pairs.clear();
        let len = shape.iter().product();
        self.data.reserve_exact(usize::saturating_sub(len, self.data.len()));
        self.data.resize(len, 0.0);
    }

    /// Bytes allocated for elements, of the largest shape so far, and for their rounded pairs.
    pub fn bytes(&self) -> usize {
        self.data.capacity() * size_of::<f32>() + self.pairs.capacity() * size_of::<u32>()
    }

    /// Sets every element.
    pub fn fill(&mut self, value: f32) {
        self.data_mut().fill(value);
    }
}

#[cfg(test)]
mod tests {
    use super::Tensor;

    #[test]
    fn a_tensor_takes_what_its_largest_shape_needs() {
        let mut t = Tensor::default();
        for (rows, bytes) in [(100, 1200), (7, 1200), (101, 1212), (100, 1212)] {
            t.resize(&[rows, 3]);
            assert_eq!((t.len(), t.bytes()), (3 * rows, bytes));
        }
    }
}
