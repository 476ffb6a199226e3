//! A machine without a driver, with a stub of one, or with an old one: errors that explain it, and no panic.

use crate::{Context, DeviceUuid, Driver, NoDriver};

use super::{fake, fake_cuda};

/// Checks the error of the driver's start under these settings.
fn refusal(settings: &str, check: impl FnOnce(NoDriver)) {
    fake::under(settings, || check(Driver::get().expect_err("refused")));
}

#[test]
fn a_missing_library_is_refused() {
    if fake::is_inside() {
        let refused = Driver::get().expect_err("nothing to load");
        assert_eq!(refused, NoDriver::NoLibrary);
        assert!(refused.to_string().contains("libcuda.so.1 is not"));
        return;
    }
    // A file that is no library hides one that would be found after it.
    let empty = tempfile::NamedTempFile::new().expect("a file");
    let folder = fake::folder(empty.path());
    fake::succeeded(&fake::again(folder.path(), ""), "no library");
}

#[test]
fn a_stub_of_the_toolkit_is_refused() {
    refusal("init=34", |refused| {
        let text = refused.to_string();
        assert!(
            text.contains("CUDA_ERROR_STUB_LIBRARY (34): the library is a stub"),
            "{text}"
        );
    });
}

#[test]
fn a_library_that_does_not_fit_the_kernel_is_refused() {
    refusal("init=803", |refused| {
        let text = refused.to_string();
        assert!(text.contains("(803)"), "{text}");
        assert!(text.contains("restart the machine"), "{text}");
    });
}

#[test]
fn a_start_without_a_device_is_refused() {
    refusal("init=100", |refused| {
        assert_eq!(refused, NoDriver::NoDevice)
    });
}

#[test]
fn a_device_count_of_zero_is_refused() {
    refusal("devices=0", |refused| {
        assert_eq!(refused, NoDriver::NoDevice)
    });
}

/// `libcuda.so` in the folder of a toolkit is a stub; the driver's own library has another name.
#[test]
fn a_stub_beside_the_drivers_library_is_not_loaded() {
    if fake::is_inside() {
        Driver::get().expect("the driver's own library");
        return;
    }
    let (stub, _home) = fake_cuda::without(&["cuInit"]);
    let folder = fake::folder(&fake::library());
    let plain = folder.path().join("libcuda.so");
    std::fs::remove_file(&plain).expect("a link");
    std::fs::copy(stub.path().join("libcuda.so"), plain).expect("a library");
    fake::succeeded(&fake::again(folder.path(), ""), "a stub under another name");
}

/// After a failure of `cuInit` a process cannot rely on later calls, whatever they return.
#[test]
fn a_driver_that_does_not_start_is_started_once() {
    let said = fake::under("fail=*/cuInit/1/999", || {
        let text = refused_in_words();
        assert!(text.contains("(999)"), "{text}");
        assert!(text.contains("nvidia-uvm"), "{text}");
        assert_eq!(refused_in_words(), text);
    });
    let Some(said) = said else { return };
    assert!(said.contains("cuInit fails with 999"), "{said}");
}

fn refused_in_words() -> String {
    Driver::get().expect_err("refused").to_string()
}

/// Two instances of one GPU are two devices, and engine and worker must use the same one.
#[test]
fn instances_of_one_gpu_have_names_of_their_own() {
    fake::under_and_clean("devices=2;mig=1", || {
        let driver = Driver::get().expect("it is there");
        let devices = driver.devices().expect("listed");
        assert_ne!(devices[0].uuid, devices[1].uuid);
        for device in devices {
            let text = device.uuid.to_string();
            assert!(text.starts_with("MIG-"), "{text}");
            let parsed: DeviceUuid = text.parse().expect("a name");
            assert_eq!(driver.find(parsed), Ok(Some(device)));
        }
    });
}

/// A driver before 11.4 has no UUIDs of instances.
#[test]
fn a_driver_without_names_of_instances_names_the_gpu() {
    if fake::is_inside() {
        let driver = Driver::get().expect("new enough");
        let device = driver.devices().expect("listed")[0];
        assert!(device.uuid.to_string().starts_with("GPU-"));
        return;
    }
    let (folder, _home) = fake_cuda::without(&["cuDeviceGetUuid_v2"]);
    fake::succeeded(&fake::again(folder.path(), "mig=1"), "an older driver");
}

#[test]
fn a_driver_that_is_too_old_is_refused() {
    if fake::is_inside() {
        let refused = Driver::get().expect_err("too old");
        assert_eq!(refused, NoDriver::TooOld("cuMemHostRegister_v2"));
        assert!(refused.to_string().contains("install driver 525"));
        return;
    }
    let (folder, _home) = fake_cuda::without(&["cuMemHostRegister_v2"]);
    fake::succeeded(&fake::again(folder.path(), ""), "an old driver");
}

#[test]
fn a_driver_without_newer_functions_is_used() {
    if fake::is_inside() {
        let driver = Driver::get().expect("new enough");
        assert!(!driver.writes_words());
        let device = driver.devices().expect("listed")[0];
        let context = Context::new(driver, device).expect("a context");
        assert_eq!(context.copies_together(), Ok(false));
        return;
    }
    let newer = [
        "cuStreamWriteValue64_v2",
        "cuMemcpyBatchAsync",
        "cuMemcpyBatchAsync_v2",
    ];
    let (folder, _home) = fake_cuda::without(&newer);
    fake::succeeded(&fake::again(folder.path(), ""), "an older driver");
}

#[test]
fn gpus_are_found_by_their_names() {
    fake::under_and_clean("devices=3;version=13000", || {
        let driver = Driver::get().expect("it is there");
        assert_eq!(driver.version(), 13_000);
        assert!(driver.writes_words());
        let devices = driver.devices().expect("listed");
        assert_eq!(devices.len(), 3);
        let text = devices[2].uuid.to_string();
        let second: DeviceUuid = text.parse().expect("a name");
        let found = driver.find(second).expect("asked").expect("there");
        assert_eq!(found, devices[2]);
        assert_eq!(driver.find(DeviceUuid::gpu([7; 16])), Ok(None));
        let context = Context::new(driver, found).expect("a context");
        assert_eq!(context.copies_together(), Ok(true));
        assert_eq!(context.pci_bus_id().as_deref(), Ok("0000:fe:00.0"));
        assert_eq!(context.name().as_deref(), Ok("kvferry fake GPU"));
        let attributes = [91, 99, 122, 133].map(|number| context.attribute(number));
        assert_eq!(attributes, [Ok(1), Ok(1), Ok(1), Ok(0)]);
        let unknown = context.attribute(9999).expect_err("not known");
        assert!(!unknown.is_fatal(), "{unknown}");
    });
}

#[test]
fn names_of_gpus_are_written_as_nvidia_writes_them() {
    let uuid = DeviceUuid::gpu(*b"0123456789abcdef");
    let text = "GPU-30313233-3435-3637-3839-616263646566";
    assert_eq!(uuid.to_string(), text);
    assert_eq!(text.parse(), Ok(uuid));
    assert_eq!(text[4..].parse(), Ok(uuid));
    for wrong in [
        "",
        "GPU-",
        "0",
        "GPU-30313233-3435-3637-3839-6162636465",
        "zz",
    ] {
        assert_eq!(wrong.parse::<DeviceUuid>(), Err(()), "{wrong}");
    }
}
