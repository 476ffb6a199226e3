//! Connections between processes, without sockets, clocks or async: hello, admission, credits, retries.
//!
//! A session receives the frames of its peers and the time, and sends frames through its *host*: the transport
//! implements it with sockets, the simulator with its network.

#![forbid(unsafe_code)]

mod admission;
mod client;
mod failure;
mod origin;
mod server;
#[cfg(test)]
mod tests;

pub use admission::{BAD_MAX, HELLO_DEADLINE, STRANGERS_MAX};
pub use client::{
    CLIENT_OPEN_MAX, CONNECT_TIMEOUT, ClientEvent, ClientRequest, ClientSession, ClientTimes,
};
pub use failure::{Failure, answer_of};
pub use origin::{CertificateHolder, Claims, DEPLOYMENT_BYTES_MAX, Origin, check_deployment};
pub use server::{
    Encoded, ServerEvent, ServerHost, ServerSession, ServerSettings, by_name, encode_order,
    encode_reply, order_envelope,
};
