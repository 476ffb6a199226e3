//! Where a connection comes from, and which hellos may be sent over it.

use std::fmt;
use std::str::FromStr;

use kvferry_protocol::{Class, ErrorBody, ErrorCode, Hello, MessageKind, Role};
use kvferry_types::{Caller, Rank, Replica, User, WorkerId};

/// Longest name of a deployment, in bytes.
pub const DEPLOYMENT_BYTES_MAX: usize = 63;
/// Start of the URI that a certificate holds.
const SCHEME: &str = "kvferry://";

/// The other end of a connection, as the transport knows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Origin {
    /// A process of this machine, reported by the kernel. A process of kvferry's own user may have each role, one of another
    /// user is an engine or one of its ranks.
    Local {
        /// User of the process.
        user: User,
        /// Id of the process; `None` if the kernel does not report it.
        pid: Option<i32>,
    },
    /// A process, possibly of another machine, that has proven its certificate.
    Certificate(Claims),
}

/// Contents of a certificate: `kvferry://DEPLOYMENT/HOLDER`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Claims {
    /// Name of the deployment: 1 to 63 of `a-z`, `0-9` and `-`.
    pub deployment: String,
    /// The process that the certificate is for.
    pub holder: CertificateHolder,
}

/// The process that a certificate is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CertificateHolder {
    /// `leader`: the listening side.
    Leader,
    /// `worker/REPLICA/RANK`.
    Worker(WorkerId),
    /// `admin`: commands of an operator.
    Admin,
    /// `monitor`: commands that change nothing.
    Monitor,
}

impl Origin {
    /// The process, as far as this machine knows it. A certificate stands for a process of kvferry's own user.
    pub fn caller(&self) -> Caller {
        match self {
            Self::Local { user, pid } => Caller {
                user: *user,
                pid: *pid,
            },
            Self::Certificate(_) => Caller::default(),
        }
    }

    /// Compares role, replica and rank of a hello with the user or the certificate. The only place where these are compared.
    ///
    /// A supervisor has the certificate of its worker: its report of the worker's end is taken as the worker's own reports of
    /// the ends of its copies are. On the leader's machine the kernel reports the ends of processes.
    ///
    /// # Errors
    /// The refusal of the hello.
    pub fn permits(&self, hello: &Hello) -> Result<(), ErrorBody> {
        let claims = match self {
            Self::Local { user, .. } => return permits_user(*user, hello.role),
            Self::Certificate(claims) => claims,
        };
        let permitted = match claims.holder {
            CertificateHolder::Leader => false,
            CertificateHolder::Worker(WorkerId { replica, rank }) => {
                matches!(hello.role, Role::Worker | Role::Supervisor)
                    && (hello.replica, hello.rank) == (replica.0, rank.0)
            }
            CertificateHolder::Admin | CertificateHolder::Monitor => hello.role == Role::Admin,
        };
        if permitted {
            return Ok(());
        }
        let text = format!(
            "role {:?}, replica {}, rank {} is not what the certificate of {claims} is for: use the credentials that `kvferry keygen` wrote for that process",
            hello.role, hello.replica, hello.rank
        );
        Err(ErrorBody::new(ErrorCode::Invalid, text))
    }

    /// Whether a peer of this origin may send a kind that its role may send. No peer on another machine drains a process
    /// or changes its log, and a monitor requests only what changes nothing.
    pub fn may_send(&self, kind: MessageKind) -> bool {
        let Self::Certificate(claims) = self else {
            return true;
        };
        if matches!(kind, MessageKind::Drain | MessageKind::SetLog) {
            return false;
        }
        if claims.holder != CertificateHolder::Monitor {
            return true;
        }
        kind.class() == Class::Answer
            || matches!(
                kind,
                MessageKind::Hello
                    | MessageKind::Ping
                    | MessageKind::Status
                    | MessageKind::ReadEvents
            )
    }
}

/// Other users have the roles of engines: the others move, remove or read pages of all users.
fn permits_user(user: User, role: Role) -> Result<(), ErrorBody> {
    if user == User::Own && role == Role::Supervisor {
        return Err(ErrorBody::new(
            ErrorCode::Invalid,
            "role is 'supervisor', without a certificate: connect to the leader's address for other machines, with the credentials of the worker",
        ));
    }
    if user == User::Own || matches!(role, Role::Engine | Role::Rank) {
        return Ok(());
    }
    let text = format!(
        "role is '{}', and {user} has the roles engine and rank here: use the user that kvferry runs as",
        role.name()
    );
    Err(ErrorBody::new(ErrorCode::Forbidden, text))
}

/// Checks the name of a deployment.
///
/// # Errors
/// Says what a name is made of.
pub fn check_deployment(name: &str) -> Result<(), String> {
    let valid = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    match (1..=DEPLOYMENT_BYTES_MAX).contains(&name.len()) && name.bytes().all(valid) {
        true => Ok(()),
        false => Err(format!(
            "deployment is {name:?}: use 1 to {DEPLOYMENT_BYTES_MAX} of a-z, 0-9 and -"
        )),
    }
}

impl fmt::Display for CertificateHolder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Leader => f.write_str("leader"),
            Self::Worker(WorkerId { replica, rank }) => {
                write!(f, "worker/{}/{}", replica.0, rank.0)
            }
            Self::Admin => f.write_str("admin"),
            Self::Monitor => f.write_str("monitor"),
        }
    }
}

impl fmt::Display for Claims {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{SCHEME}{}/{}", self.deployment, self.holder)
    }
}

impl FromStr for Claims {
    type Err = String;

    /// Reads a URI in the form that [`fmt::Display`] writes, and in no other.
    fn from_str(uri: &str) -> Result<Self, String> {
        let read = || {
            let (deployment, holder) = uri.strip_prefix(SCHEME)?.split_once('/')?;
            let holder = match holder {
                "leader" => CertificateHolder::Leader,
                "admin" => CertificateHolder::Admin,
                "monitor" => CertificateHolder::Monitor,
                worker => {
                    let (replica, rank) = worker.strip_prefix("worker/")?.split_once('/')?;
                    CertificateHolder::Worker(WorkerId {
                        replica: Replica(replica.parse().ok()?),
                        rank: Rank(rank.parse().ok()?),
                    })
                }
            };
            check_deployment(deployment).ok()?;
            let claims = Self {
                deployment: deployment.to_owned(),
                holder,
            };
            // No other spelling of the same numbers.
            (claims.to_string() == uri).then_some(claims)
        };
        read().ok_or_else(|| format!("{uri:?} names no process of a kvferry deployment"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claims(text: &str) -> Claims {
        text.parse().expect("claims")
    }

    #[test]
    fn claims_have_one_spelling() {
        for uri in [
            "kvferry://a/leader",
            "kvferry://prod-1/worker/0/12",
            "kvferry://x/admin",
            "kvferry://x/monitor",
        ] {
            assert_eq!(claims(uri).to_string(), uri);
        }
        let long = format!("kvferry://{}/leader", "x".repeat(64));
        for uri in [
            "kvferry://a/worker/0",
            "kvferry://a/worker/00/1",
            "kvferry://a/worker/+0/1",
            "kvferry://a/worker/0/1/",
            "kvferry://a/worker/0/65536",
            "kvferry://a/engine/x",
            "kvferry://A/leader",
            "kvferry:///leader",
            "kvferry://a/leader ",
            "https://a/leader",
            "",
            &long,
        ] {
            assert!(uri.parse::<Claims>().is_err(), "{uri}");
        }
    }

    #[test]
    fn a_certificate_permits_its_own_hello_only() {
        let hello = |role, replica, rank| Hello {
            replica,
            rank,
            ..Hello::new(role, "test")
        };
        let roles = [
            Role::Engine,
            Role::Rank,
            Role::Worker,
            Role::Admin,
            Role::Supervisor,
        ];
        for holder in ["leader", "worker/1/2", "admin", "monitor"] {
            let origin = Origin::Certificate(claims(&format!("kvferry://d/{holder}")));
            assert_eq!(origin.caller().pid, None);
            for role in roles {
                for (replica, rank) in [(1, 2), (2, 1), (1, 1), (0, 0)] {
                    let own = match role {
                        Role::Worker | Role::Supervisor => {
                            holder == "worker/1/2" && (replica, rank) == (1, 2)
                        }
                        Role::Admin => holder == "admin" || holder == "monitor",
                        _ => false,
                    };
                    let permitted = origin.permits(&hello(role, replica, rank));
                    assert_eq!(
                        permitted.is_ok(),
                        own,
                        "{holder}: {role:?} {replica} {rank}"
                    );
                }
            }
        }
        let local = |user| Origin::Local { user, pid: Some(7) };
        assert_eq!(local(User::Own).caller().pid, Some(7));
        for role in roles {
            let permitted = local(User::Own).permits(&hello(role, 1, 2)).is_ok();
            assert_eq!(permitted, role != Role::Supervisor, "{role:?}");
        }
    }

    #[test]
    fn another_user_has_the_roles_of_engines() {
        let other = Origin::Local {
            user: User::Other(1001),
            pid: Some(7),
        };
        assert_eq!(other.caller().user, User::Other(1001));
        for (role, permitted) in [
            (Role::Engine, true),
            (Role::Rank, true),
            (Role::Worker, false),
            (Role::Admin, false),
            (Role::Supervisor, false),
            (Role::Unknown, false),
        ] {
            let refused = other.permits(&Hello::new(role, "test")).err();
            assert_eq!(refused.is_none(), permitted, "{role:?}");
            if let Some(refused) = refused {
                assert_eq!(refused.code(), ErrorCode::Forbidden);
                assert!(refused.message.contains("uid 1001"), "{}", refused.message);
            }
        }
    }

    #[test]
    fn a_monitor_requests_what_changes_nothing() {
        let monitor = Origin::Certificate(claims("kvferry://d/monitor"));
        let admin = Origin::Certificate(claims("kvferry://d/admin"));
        let requests = MessageKind::ALL.iter().copied();
        let requests =
            requests.filter(|kind| kind.class() == Class::Request && kind.sent_by(Role::Admin));
        let (may, may_not): (Vec<_>, Vec<_>) = requests.partition(|kind| monitor.may_send(*kind));
        let [status, read] = [MessageKind::Status, MessageKind::ReadEvents];
        assert!(may.contains(&status) && may.contains(&read), "{may:?}");
        assert!(may_not.contains(&MessageKind::Reset), "{may_not:?}");
        // Only processes of the same machine.
        let local = [MessageKind::Drain, MessageKind::SetLog];
        for kind in may_not {
            assert_eq!(
                admin.may_send(kind),
                !local.contains(&kind),
                "{}",
                kind.name()
            );
        }
        let here = Origin::Local {
            user: User::Own,
            pid: None,
        };
        assert!(local.into_iter().all(|kind| here.may_send(kind)));
    }
}
