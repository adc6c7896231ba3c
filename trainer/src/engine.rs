//! A checkpoint ready to answer: decoder, tokenizer and worker pool behind the trait that evals see.
