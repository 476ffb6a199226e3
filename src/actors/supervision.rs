//! Starts the actors of a process, and ends the process when one of them fails: a process with a failed part must not
//! continue. Its supervisor starts a new one.

use ractor::{Actor, ActorCell, ActorProcessingErr, ActorRef, SpawnErr, SupervisionEvent};
use tokio::sync::oneshot;

use crate::leader::{LeaderActor, LeaderArguments, LeaderHandle};
use crate::worker::{WorkerActor, WorkerArguments};

/// A running process: its root actor, its main actor, and the first failure.
pub struct ProcessHandle {
    root: ActorRef<RootMessage>,
    actor: ActorCell,
    failed: oneshot::Receiver<String>,
}

impl ProcessHandle {
    /// Waits until an actor fails, and returns the reason.
    pub async fn failed(&mut self) -> String {
        (&mut self.failed)
            .await
            .unwrap_or_else(|_| "the supervisor ended".to_owned())
    }

    /// Stops the actor and then its supervisor, and waits for both: the end of the supervisor alone would abort its
    /// children.
    pub async fn stop(self) {
        if let Err(error) = self.actor.stop_and_wait(None, None).await {
            tracing::debug!(%error, "the actor had ended");
        }
        if let Err(error) = self.root.stop_and_wait(None, None).await {
            tracing::debug!(%error, "the supervisor had ended");
        }
    }
}

struct RootActor;

enum RootMessage {}

struct RootState(Option<oneshot::Sender<String>>);

impl Actor for RootActor {
    type Msg = RootMessage;
    type State = RootState;
    type Arguments = oneshot::Sender<String>;

    async fn pre_start(
        &self,
        _myself: ActorRef<RootMessage>,
        failed: oneshot::Sender<String>,
    ) -> Result<RootState, ActorProcessingErr> {
        Ok(RootState(Some(failed)))
    }

    async fn handle_supervisor_evt(
        &self,
        myself: ActorRef<RootMessage>,
        event: SupervisionEvent,
        state: &mut RootState,
    ) -> Result<(), ActorProcessingErr> {
        let why = match event {
            SupervisionEvent::ActorFailed(_, error) => error.to_string(),
            SupervisionEvent::ActorTerminated(..) => "an actor ended".to_owned(),
            _ => return Ok(()),
        };
        if let Some(failed) = state.0.take()
            && failed.send(why).is_err()
        {
            tracing::debug!("no receiver for failures");
        }
        myself.stop(None);
        Ok(())
    }
}

async fn root() -> Result<(ActorRef<RootMessage>, oneshot::Receiver<String>), SpawnErr> {
    let (failed, failure) = oneshot::channel();
    let (root, _) = Actor::spawn(None, RootActor, failed).await?;
    Ok((root, failure))
}

/// Starts a leader in this process.
pub async fn run_leader(
    arguments: LeaderArguments,
) -> Result<(ProcessHandle, LeaderHandle), SpawnErr> {
    let (root, failed) = root().await?;
    let (leader, _) = Actor::spawn_linked(None, LeaderActor, arguments, root.get_cell()).await?;
    Ok((
        ProcessHandle {
            root,
            actor: leader.get_cell(),
            failed,
        },
        LeaderHandle::new(leader),
    ))
}

/// Starts a worker in this process.
pub async fn run_worker(arguments: WorkerArguments) -> Result<ProcessHandle, SpawnErr> {
    let (root, failed) = root().await?;
    let (worker, _) = Actor::spawn_linked(None, WorkerActor, arguments, root.get_cell()).await?;
    Ok(ProcessHandle {
        root,
        actor: worker.get_cell(),
        failed,
    })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    struct Panics;

    impl Actor for Panics {
        type Msg = ();
        type State = ();
        type Arguments = ();

        async fn pre_start(&self, _myself: ActorRef<()>, (): ()) -> Result<(), ActorProcessingErr> {
            Ok(())
        }

        async fn handle(
            &self,
            _myself: ActorRef<()>,
            (): (),
            (): &mut (),
        ) -> Result<(), ActorProcessingErr> {
            panic!("a bug")
        }
    }

    #[tokio::test(start_paused = true)]
    async fn an_actor_that_panics_ends_its_process_with_the_reason() {
        let (root, failed) = root().await.expect("a supervisor");
        let (actor, _) = Actor::spawn_linked(None, Panics, (), root.get_cell())
            .await
            .expect("an actor");
        let mut process = ProcessHandle {
            root,
            actor: actor.get_cell(),
            failed,
        };
        actor.cast(()).expect("it takes messages");
        let why = tokio::time::timeout(Duration::from_secs(5), process.failed()).await;
        let why = why.expect("it is noticed");
        assert!(why.contains("a bug"), "{why}");
        process.stop().await;
    }
}
