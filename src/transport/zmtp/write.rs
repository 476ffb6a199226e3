//! Encoders for the gate's own frames.

use super::{
    FLAG_COMMAND, FLAG_LONG, FLAG_MORE, GREETING_BYTES, HEAD_BYTES_MAX, Part, PingContext,
};

/// Returns a greeting of ZMTP 3.0 with the NULL mechanism.
pub(crate) fn greeting() -> [u8; GREETING_BYTES] {
    let mut bytes = [0; GREETING_BYTES];
    bytes[0] = 0xff;
    bytes[8] = 1;
    bytes[9] = 0x7f;
    bytes[10] = 3;
    bytes[12..16].copy_from_slice(b"NULL");
    bytes
}

/// Returns a READY command with a socket type and, if not empty, an identity of at most 200 bytes.
pub(crate) fn ready(socket_type: &str, identity: &[u8]) -> Vec<u8> {
    let mut body = Vec::with_capacity(64);
    put_string(&mut body, b"READY");
    put_property(&mut body, b"Socket-Type", socket_type.as_bytes());
    if !identity.is_empty() {
        put_property(&mut body, b"Identity", identity);
    }
    command(&body)
}

/// Returns the PONG command that answers a PING.
pub(crate) fn pong(context: &PingContext) -> Vec<u8> {
    let mut body = Vec::with_capacity(32);
    put_string(&mut body, b"PONG");
    body.extend_from_slice(&context.bytes[..context.len]);
    command(&body)
}

/// Appends the frame head of a message part.
pub(crate) fn put_head(out: &mut Vec<u8>, part: Part, bytes: u64) {
    let more = match part {
        Part::Header => FLAG_MORE,
        Part::Body => 0,
    };
    match u8::try_from(bytes) {
        Ok(short) => out.extend_from_slice(&[more, short]),
        Err(_) => {
            out.push(more | FLAG_LONG);
            out.extend_from_slice(&bytes.to_be_bytes());
        }
    }
}

fn command(body: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(body.len() + HEAD_BYTES_MAX);
    match u8::try_from(body.len()) {
        Ok(short) => out.extend_from_slice(&[FLAG_COMMAND, short]),
        Err(_) => {
            out.push(FLAG_COMMAND | FLAG_LONG);
            out.extend_from_slice(&(body.len() as u64).to_be_bytes());
        }
    }
    out.extend_from_slice(body);
    out
}

fn put_string(out: &mut Vec<u8>, text: &[u8]) {
    out.push(u8::try_from(text.len()).unwrap_or(u8::MAX));
    out.extend_from_slice(text);
}

fn put_property(out: &mut Vec<u8>, name: &[u8], value: &[u8]) {
    put_string(out, name);
    out.extend_from_slice(&u32::try_from(value.len()).unwrap_or(u32::MAX).to_be_bytes());
    out.extend_from_slice(value);
}
