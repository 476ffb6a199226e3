//! Where metrics and health are served.

use std::fmt;
use std::net::{Ipv4Addr, SocketAddr};
use std::str::FromStr;

/// An address, or nowhere.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MonitorAddress(pub Option<SocketAddr>);

const OFF: &str = "off";

impl fmt::Display for MonitorAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(address) => address.fmt(f),
            None => f.write_str(OFF),
        }
    }
}

impl FromStr for MonitorAddress {
    type Err = ();

    /// Reads `off`, a port on the loopback address, or an address with a port. Names of hosts are not resolved: a name may
    /// stand for more than one network.
    fn from_str(text: &str) -> Result<Self, ()> {
        if text == OFF {
            return Ok(Self(None));
        }
        let loopback = |port: u16| SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        let port = text.parse::<u16>().ok().map(loopback);
        let address = port.or_else(|| text.parse().ok());
        address.map(|address| Self(Some(address))).ok_or(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_alone_is_one_of_the_loopback_address() {
        for (text, address) in [
            ("off", "off"),
            ("9464", "127.0.0.1:9464"),
            ("127.0.0.1:1", "127.0.0.1:1"),
            ("0.0.0.0:9464", "0.0.0.0:9464"),
            ("[::1]:9464", "[::1]:9464"),
        ] {
            let read = text.parse::<MonitorAddress>().expect("an address");
            assert_eq!(read.to_string(), address);
            assert_eq!(address.parse(), Ok(read), "read back");
        }
        for wrong in [
            "",
            "on",
            "65536",
            "localhost:9464",
            "127.0.0.1",
            ":9464",
            "-1",
        ] {
            assert_eq!(wrong.parse::<MonitorAddress>(), Err(()), "{wrong}");
        }
    }
}
