//! Tests of plans: the examples of their definition, every error, and a comparison with copies byte by byte.

mod bytes;
mod errors;
mod examples;
mod model;
