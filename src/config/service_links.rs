//! The variables that Kubernetes sets in each container for each Service of its namespace.
//!
//! They begin with the Service's name in capitals. Where that is `kvferry` or `kvferry-metrics`, they look like settings:
//!
//! ```text
//! KVFERRY_SERVICE_HOST=10.0.0.1            KVFERRY_PORT=tcp://10.0.0.1:9464
//! KVFERRY_SERVICE_PORT=9464                KVFERRY_PORT_9464_TCP=tcp://10.0.0.1:9464
//! KVFERRY_SERVICE_PORT_METRICS=9464        KVFERRY_PORT_9464_TCP_PROTO=tcp, ..._PORT=9464, ..._ADDR=10.0.0.1
//! ```

use std::net::{IpAddr, SocketAddr};

/// Protocols of the ports of Services.
const PROTOCOLS: [&str; 3] = ["tcp", "udp", "sctp"];

/// Whether a variable is one of a Service. `rest` is its name without `KVFERRY_`. The value must fit the name, so that a
/// setting that somebody invents, such as `KVFERRY_MONITOR_PORT=9464`, is still refused.
pub(super) fn is_service_link(rest: &str, value: &str) -> bool {
    let is_port = |text: &str| text.parse::<u16>().is_ok();
    // The name of the Service may itself contain these words: each place is tried.
    after_word(rest, "SERVICE_HOST").any(|after| after.is_empty() && is_ip(value))
        || after_word(rest, "SERVICE_PORT").any(|after| {
            let named = after.strip_prefix('_').is_some_and(|name| !name.is_empty());
            (after.is_empty() || named) && is_port(value)
        })
        || after_word(rest, "PORT").any(|after| match after.is_empty() {
            true => is_address(value, None),
            false => is_port_detail(after, value),
        })
}

/// What follows `word` in `text`, for each place where it stands at the beginning or after `_`.
fn after_word<'a>(text: &'a str, word: &'a str) -> impl Iterator<Item = &'a str> {
    text.match_indices(word)
        .filter(|(at, _)| *at == 0 || text[..*at].ends_with('_'))
        .map(|(at, word)| &text[at + word.len()..])
}

/// The variables of one port: `_9464_TCP`, and with `_PROTO`, `_PORT` or `_ADDR`.
fn is_port_detail(after: &str, value: &str) -> bool {
    let parts: Vec<&str> = after.split('_').collect();
    let ["", port, protocol, detail @ ..] = parts.as_slice() else {
        return false;
    };
    let name = protocol.to_lowercase();
    if port.parse::<u16>().is_err() || !PROTOCOLS.contains(&name.as_str()) {
        return false;
    }
    match detail {
        [] => is_address(value, Some(&name)),
        ["PROTO"] => value == name,
        ["PORT"] => value == *port,
        ["ADDR"] => is_ip(value),
        _ => false,
    }
}

fn is_ip(value: &str) -> bool {
    value.parse::<IpAddr>().is_ok()
}

/// `tcp://10.0.0.1:9464`, of this protocol or any.
fn is_address(value: &str, protocol: Option<&str>) -> bool {
    value.split_once("://").is_some_and(|(name, at)| {
        PROTOCOLS.contains(&name)
            && protocol.is_none_or(|protocol| protocol == name)
            && at.parse::<SocketAddr>().is_ok()
    })
}

#[cfg(test)]
mod tests {
    use super::super::keys::KEYS;
    use super::*;

    /// The variables that a kubelet sets for a Service with these ports: number, protocol, and name if it has one.
    fn of_service(name: &str, ip: &str, ports: &[(u16, &str, &str)]) -> Vec<(String, String)> {
        let capitals = |text: &str| text.to_uppercase().replace('-', "_");
        let service = capitals(name);
        let host = if ip.contains(':') {
            format!("[{ip}]")
        } else {
            ip.to_owned()
        };
        let first = ports[0];
        let mut variables = vec![
            (format!("{service}_SERVICE_HOST"), ip.to_owned()),
            (format!("{service}_SERVICE_PORT"), first.0.to_string()),
            (
                format!("{service}_PORT"),
                format!("{}://{host}:{}", first.1, first.0),
            ),
        ];
        for (port, protocol, port_name) in ports {
            if !port_name.is_empty() {
                let named = format!("{service}_SERVICE_PORT_{}", capitals(port_name));
                variables.push((named, port.to_string()));
            }
            let prefix = format!("{service}_PORT_{port}_{}", capitals(protocol));
            variables.extend([
                (prefix.clone(), format!("{protocol}://{host}:{port}")),
                (format!("{prefix}_PROTO"), (*protocol).to_owned()),
                (format!("{prefix}_PORT"), port.to_string()),
                (format!("{prefix}_ADDR"), ip.to_owned()),
            ]);
        }
        variables
    }

    #[test]
    fn the_variables_of_services_are_known_whatever_their_names_and_ports_are() {
        let ports: [&[(u16, &str, &str)]; 3] = [
            &[(9464, "tcp", "")],
            &[(9464, "tcp", "metrics"), (53, "udp", "dns-port")],
            &[(1, "sctp", "port-80-tcp")],
        ];
        let names = [
            "kvferry",
            "kvferry-metrics",
            "kvferry-monitor",
            "kvferry-port",
            "kvferry-service-port",
            "kvferry-g2",
        ];
        for name in names {
            for ip in ["10.0.0.1", "fd00::1"] {
                for ports in ports {
                    for (variable, value) in of_service(name, ip, ports) {
                        let rest = variable.strip_prefix("KVFERRY_").expect("the prefix");
                        assert!(is_service_link(rest, &value), "{variable}={value}");
                    }
                }
            }
        }
    }

    #[test]
    fn a_value_that_no_service_has_makes_a_variable_an_unknown_key() {
        for (rest, value) in [
            ("MONITOR_PORT", "9464"),
            ("PORT", "9464"),
            ("PORT", "tcp://somewhere:9464"),
            ("PORT", "http://10.0.0.1:9464"),
            ("SERVICE_HOST", "localhost"),
            ("SERVICE_PORT", "http"),
            ("SERVICE_PORTS", "1"),
            ("SERVICE_PORT_", "1"),
            ("PORT_9464_TCP", "udp://10.0.0.1:9464"),
            ("PORT_9464_TCP_PORT", "9465"),
            ("PORT_9464_TCP_NAME", "x"),
            ("PORT_9464", "tcp://10.0.0.1:9464"),
            ("SUPPORT", "tcp://10.0.0.1:9464"),
            ("RATIOS", "3"),
        ] {
            assert!(!is_service_link(rest, value), "{rest}={value}");
        }
    }

    #[test]
    fn no_setting_has_the_name_of_a_services_variable() {
        let values = ["10.0.0.1", "1", "tcp://10.0.0.1:1", "tcp"];
        for key in &KEYS {
            let rest = key.name.to_uppercase();
            assert!(
                values.iter().all(|value| !is_service_link(&rest, value)),
                "{}: name the setting otherwise, or a Service named kvferry-... sets it",
                key.name
            );
        }
    }
}
