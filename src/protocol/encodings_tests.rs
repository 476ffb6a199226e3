//! Each body has one encoding: what serde would read beside it is refused, and words of later versions are read.

use crate::codec::{Message, decode};
use crate::error::ErrorCode;
use crate::header::Header;
use crate::kind::MessageKind;
use crate::role::Role;
use kvferry_types::{
    AllocationHandle, AllocationKind, Attention, Epoch, GroupMemory, RequestId, Slices, TensorRole,
};

fn read(kind: MessageKind, body: &[u8]) -> Result<Message, ErrorCode> {
    let header = Header {
        version: 2,
        kind: kind.number(),
        correlation: RequestId(1),
        deadline_ms: 1,
        required: 0,
        epoch: Epoch(0),
    };
    let decoded = decode(header, body);
    decoded
        .map(|envelope| envelope.message)
        .map_err(|error| error.code())
}

fn is_malformed(kind: MessageKind, body: &[u8]) {
    assert_eq!(
        read(kind, body).map(|message| message.kind()),
        Err(ErrorCode::Malformed),
        "{body:02x?}"
    );
}

/// A text of at most 31 bytes.
fn text(text: &str) -> Vec<u8> {
    let length = u8::try_from(text.len()).expect("short");
    assert!(length < 32);
    [&[0xa0 | length], text.as_bytes()].concat()
}

/// A map with these encoded values.
fn map(fields: &[(&str, Vec<u8>)]) -> Vec<u8> {
    let mut bytes = vec![0x80 | u8::try_from(fields.len()).expect("few")];
    for (name, value) in fields {
        bytes.extend(text(name));
        bytes.extend(value);
    }
    bytes
}

#[test]
fn a_body_is_a_map_of_texts() {
    let slot = map(&[("slot", vec![7])]);
    assert!(read(MessageKind::Finish, &slot).is_ok());
    // A list of the values, a field by its number, and one by bytes.
    is_malformed(MessageKind::Finish, &[0x91, 7]);
    is_malformed(MessageKind::Finish, &[0x81, 0, 7]);
    is_malformed(MessageKind::Finish, b"\x81\xc4\x04slot\x07");
    // A field twice, and a byte too many.
    is_malformed(MessageKind::Finish, b"\x82\xa4slot\x07\xa4slot\x07");
    is_malformed(MessageKind::Finish, &[&slot[..], &[0]].concat());
}

#[test]
fn a_word_is_text_and_an_unknown_one_may_have_any_content() {
    let hello = |role: Vec<u8>| {
        map(&[
            ("version_min", vec![1]),
            ("version_max", vec![2]),
            ("role", role),
        ])
    };
    let role = |bytes: Vec<u8>| match read(MessageKind::Hello, &hello(bytes)) {
        Ok(Message::Hello(hello)) => hello.role,
        other => panic!("{other:?}"),
    };
    assert_eq!(role(text("engine")), Role::Engine);
    assert_eq!(role(text("gauge")), Role::Unknown);
    // The names of catch-alls are no words.
    assert_eq!(role(text("unknown")), Role::Unknown);
    assert_eq!(role(map(&[("unknown", vec![1])])), Role::Unknown);
    assert_eq!(role(map(&[("gauge", vec![1])])), Role::Unknown);
    assert_eq!(
        role(map(&[("gauge", map(&[("a", vec![0xc0])]))])),
        Role::Unknown
    );
    // By number, with content that a known word does not have, and two words.
    for bytes in [
        vec![0],
        map(&[("engine", vec![0xc0])]),
        map(&[("gauge", vec![1]), ("engine", vec![0xc0])]),
        vec![0x80],
        vec![0xc0],
    ] {
        is_malformed(MessageKind::Hello, &hello(bytes));
    }
}

#[test]
fn a_binary_field_is_binary() {
    let lookup = |namespace: Vec<u8>| {
        map(&[
            ("slot", vec![1]),
            ("namespace", namespace),
            ("hash_bytes", vec![16]),
            ("hashes", vec![0xc4, 0]),
        ])
    };
    assert!(read(MessageKind::Lookup, &lookup(vec![0xc4, 1, b'n'])).is_ok());
    is_malformed(MessageKind::Lookup, &lookup(text("n")));
    is_malformed(MessageKind::Lookup, &lookup(vec![0x91, b'n']));
}

#[test]
fn nil_is_absent_where_null_is_permitted() {
    let lookup = |field: &str| {
        map(&[
            ("slot", vec![1]),
            ("hash_bytes", vec![16]),
            ("hashes", vec![0xc4, 0]),
            (field, vec![0xc0]),
        ])
    };
    assert!(read(MessageKind::Lookup, &lookup("limit_pages")).is_ok());
    is_malformed(MessageKind::Lookup, &lookup("have_pages"));
}

#[test]
fn pages_are_a_list() {
    let load = |pages: Vec<u8>| {
        let part = map(&[
            ("first_page", vec![0]),
            ("pages", pages),
            ("count", vec![1]),
        ]);
        map(&[("slot", vec![1]), ("parts", [vec![0x91], part].concat())])
    };
    assert!(read(MessageKind::Load, &load(vec![0x91, 7])).is_ok());
    is_malformed(MessageKind::Load, &load(vec![7]));
}

/// What a registration says in words of a later version is read, so that the check can name the field.
#[test]
fn words_of_later_versions_are_read_in_a_registration() {
    let tensor = |role: Vec<u8>, slices: Vec<u8>| {
        map(&[
            ("layer", vec![0]),
            ("role", role),
            ("allocation", vec![0]),
            ("offset_bytes", vec![0]),
            ("shape", vec![0x91, 1]),
            ("strides", vec![0x91, 1]),
            ("element_bytes", vec![1]),
            ("page_axis", vec![0]),
            ("page_bytes", vec![1]),
            ("page_stride_bytes", vec![1]),
            ("slices", slices),
        ])
    };
    let group = |attention: Vec<u8>| {
        let later = map(&[("ring", map(&[("of", vec![4])]))]);
        let tensors = [
            vec![0x92],
            tensor(text("k_scale"), later),
            tensor(
                text("k"),
                map(&[("whole", map(&[("token_axis", vec![0])]))]),
            ),
        ];
        map(&[
            ("attention", attention),
            ("engine_page_tokens", vec![1]),
            ("device_pages", vec![1]),
            ("layers", vec![1]),
            ("tensors", tensors.concat()),
        ])
    };
    let groups = [
        vec![0x92],
        group(text("sparse")),
        group(map(&[("sparse", map(&[("block", vec![8])]))])),
    ];
    let allocation = map(&[
        ("kind", text("persistent")),
        ("handle", map(&[("hip_ipc", vec![0xc4, 1, 0])])),
        ("bytes", vec![1]),
    ]);
    let nonce = map(&[
        ("allocation", vec![0]),
        ("offset_bytes", vec![0]),
        ("bytes", vec![0xc4, 0]),
    ]);
    let registration = map(&[
        ("groups", groups.concat()),
        ("content", vec![0xc4, 1, b'c']),
        ("rank", vec![0]),
        ("tp_size", vec![1]),
        ("shard", vec![0]),
        ("allocations", [vec![0x91], allocation].concat()),
        ("nonce", nonce),
    ]);
    let engine = [vec![0xc4, 16], vec![0; 16]].concat();
    let body = map(&[("engine", engine), ("registration", registration)]);
    let registration = match read(MessageKind::Register, &body) {
        Ok(Message::Register(register)) => register.registration,
        other => panic!("{other:?}"),
    };
    for GroupMemory {
        attention, tensors, ..
    } in &registration.groups
    {
        assert_eq!(*attention, Attention::Other);
        assert_eq!(tensors[0].role, TensorRole::Other);
        assert_eq!(tensors[0].slices, Some(Slices::Other));
        assert_eq!(tensors[1].slices, Some(Slices::Whole { token_axis: 0 }));
    }
    let allocation = &registration.allocations[0];
    assert_eq!(allocation.kind, AllocationKind::Other);
    assert_eq!(allocation.handle, AllocationHandle::Other);
}
