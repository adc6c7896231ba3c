//! The thin tensor: a shape and row-major f32 storage on the host. It computes nothing; operations are modules.

/// A dense row-major f32 tensor. Fields are private so that other dtypes and devices can come without moving callers.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct Tensor {
    shape: Vec<usize>,
    data: Vec<f32>,
}

impl Tensor {
    /// A tensor of zeros.
    pub fn zeros(shape: &[usize]) -> Self {
        Self { shape: shape.to_vec(), data: vec![0.0; shape.iter().product()] }
    }

    /// Takes `data` as it lies. Panics if its length is not the product of `shape`: a programmer's error.
    pub fn from_vec(data: Vec<f32>, shape: &[usize]) -> Self {
        assert_eq!(data.len(), shape.iter().product::<usize>(), "shape {shape:?} does not fit the data");
        Self { shape: shape.to_vec(), data }
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

    /// The elements, row-major, mutable.
    pub fn data_mut(&mut self) -> &mut [f32] {
        &mut self.data
    }

    /// Row `i` of the matrix of [`Self::rows`] × [`Self::cols`].
    pub fn row(&self, i: usize) -> &[f32] {
        let c = self.cols();
        &self.data[i * c..(i + 1) * c]
    }

    /// Row `i`, mutable.
    pub fn row_mut(&mut self, i: usize) -> &mut [f32] {
        let c = self.cols();
        &mut self.data[i * c..(i + 1) * c]
    }

    /// Gives the tensor another shape, keeping its allocation where it suffices. It grows to the size asked for and no further, so
    /// that a plan of the largest batch is the memory it takes. Contents are unspecified after.
    pub fn resize(&mut self, shape: &[usize]) {
        self.shape.clear();
        self.shape.extend_from_slice(shape);
        let len = shape.iter().product();
        self.data.reserve_exact(usize::saturating_sub(len, self.data.len()));
        self.data.resize(len, 0.0);
    }

    /// Bytes allocated for elements: of the largest shape so far.
    pub fn bytes(&self) -> usize {
        self.data.capacity() * size_of::<f32>()
    }

    /// Sets every element.
    pub fn fill(&mut self, value: f32) {
        self.data.fill(value);
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
