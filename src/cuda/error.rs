//! Errors of the CUDA driver, with advice.

/// Why a call of the driver failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum CudaError {
    /// The driver refused a call, or reported late that earlier work failed.
    #[error("{call} answered {name} ({code})")]
    Answered {
        /// Name of the function.
        call: &'static str,
        /// `CUresult`, as in the driver's header.
        code: u32,
        /// The driver's name for the code.
        name: &'static str,
    },
    /// A range was refused before the driver was called.
    #[error("{0} lies outside of its memory: the driver was not called")]
    OutOfRange(&'static str),
    /// The driver lacks an optional function.
    #[error("the CUDA driver has no {0}")]
    NoFunction(&'static str),
}

impl CudaError {
    /// `CUresult`, if the driver was called.
    pub const fn code(self) -> Option<u32> {
        match self {
            Self::Answered { code, .. } => Some(code),
            Self::OutOfRange(_) | Self::NoFunction(_) => None,
        }
    }

    /// The function that failed, if the driver was called.
    pub const fn call(self) -> Option<&'static str> {
        match self {
            Self::Answered { call, .. } => Some(call),
            Self::OutOfRange(_) | Self::NoFunction(_) => None,
        }
    }

    /// Whether the context is or may be broken: every later call fails, and only the end of the process makes the GPU
    /// usable again.
    ///
    /// Every code counts as fatal except refusals that are known to concern one call (`CUresult` in the driver's
    /// reference): a code that only a newer driver returns may be fatal.
    pub const fn is_fatal(self) -> bool {
        let Some(code) = self.code() else {
            return false;
        };
        !matches!(
            code,
            // INVALID_VALUE, OUT_OF_MEMORY, INVALID_DEVICE, INVALID_IMAGE, MAP_FAILED to NOT_MAPPED,
            // PEER_ACCESS_UNSUPPORTED, INVALID_PTX, JIT_COMPILER_NOT_FOUND, UNSUPPORTED_PTX_VERSION,
            // JIT_COMPILATION_DISABLED, FILE_NOT_FOUND, SHARED_OBJECT_SYMBOL_NOT_FOUND, SHARED_OBJECT_INIT_FAILED,
            // OPERATING_SYSTEM, INVALID_HANDLE, NOT_FOUND, NOT_READY, LAUNCH_OUT_OF_RESOURCES,
            // PEER_ACCESS_ALREADY_ENABLED, _NOT_ENABLED, TOO_MANY_PEERS, HOST_MEMORY_ALREADY_REGISTERED,
            // _NOT_REGISTERED, COOPERATIVE_LAUNCH_TOO_LARGE, NOT_PERMITTED, NOT_SUPPORTED
            1 | 2
                | 101
                | 200
                | 205..=211
                | 217
                | 218
                | 221..=223
                | 301..=304
                | 400
                | 500
                | 600
                | 701
                | 704
                | 705
                | 711
                | 712
                | 713
                | 720
                | 800
                | 801
        )
    }

    /// Advice about a failure to start the driver or to create a context; empty where nothing is known.
    pub const fn hint(self) -> &'static str {
        match self.code() {
            Some(code) => hint(code),
            None => "",
        }
    }
}

/// Why GPUs cannot be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum NoDriver {
    /// The driver's library is not found.
    #[error(
        "no CUDA driver is installed: libcuda.so.1 is not in the library path (in a container, start it with GPU access)"
    )]
    NoLibrary,
    /// The driver is older than a required function.
    #[error("the CUDA driver has no {0}: install driver 525 (CUDA 12.0) or a newer one")]
    TooOld(&'static str),
    /// The driver does not start.
    #[error("the CUDA driver does not start: {error}{}", error.hint())]
    InitFailed {
        /// Error of `cuInit` or of a call right after it.
        error: CudaError,
    },
    /// The driver starts, and offers no GPU to this process.
    #[error(
        "the CUDA driver offers no GPU that this process may use (CUDA_VISIBLE_DEVICES may hide them)"
    )]
    NoDevice,
}

impl NoDriver {
    /// Whether `cuInit` was called. A later call cannot be relied on to work in the same process.
    pub const fn is_final(&self) -> bool {
        matches!(self, Self::InitFailed { .. } | Self::NoDevice)
    }
}

const fn hint(code: u32) -> &'static str {
    match code {
        2 => {
            ": the GPU's memory is full: a context takes about 0.5 GiB beside the engine's share (lower \
             gpu_memory_utilization)"
        }
        34 => {
            ": the library is a stub of the CUDA toolkit that was found before the driver's: take its folder out of \
             LD_LIBRARY_PATH"
        }
        46 => {
            ": the GPU is in exclusive or prohibited compute mode, and a worker is a process beside the engine: set it to \
             the default mode (nvidia-smi -c DEFAULT), or use MPS"
        }
        802 => {
            ": the GPUs are not ready: on a machine with NVSwitch start its fabric manager (systemctl start \
             nvidia-fabricmanager)"
        }
        803 => {
            ": the library and the kernel's driver differ in version: restart the machine after the update, or use the \
             container that fits the host's driver"
        }
        804 => {
            ": this driver is too new for the GPU's kind without the forward compatibility package"
        }
        805..=810 => {
            ": MPS: see that nvidia-cuda-mps-control runs as this user, that CUDA_MPS_PIPE_DIRECTORY is the engine's, and \
             that it allows one more client"
        }
        999 => {
            ": the device files are missing or closed to this user: load nvidia-uvm (nvidia-modprobe -u -c=0), or start the \
             container with GPU access"
        }
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fatal(code: u32) -> bool {
        let name = "an error";
        let call = "cuLaunchKernel";
        CudaError::Answered { call, code, name }.is_fatal()
    }

    /// After a module that does not load or a kernel that does not start, there is another way to copy; 221 is usual in
    /// a container without the compiler's library.
    #[test]
    fn a_refused_way_to_copy_is_no_lost_gpu() {
        for code in [200, 218, 221, 222, 223, 301, 302, 303, 701, 720] {
            assert!(!fatal(code), "{code}");
        }
        // Illegal addresses, timeouts, destroyed contexts, traps, lost devices, and codes of newer drivers only.
        for code in [
            700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 999, 12_345,
        ] {
            assert!(fatal(code), "{code}");
        }
        assert!(!CudaError::OutOfRange("a range").is_fatal());
        assert!(!CudaError::NoFunction("cuFunction").is_fatal());
    }
}
