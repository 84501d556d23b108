// Lets fake CUDA tensors pass through a build of PyTorch that has no CUDA: a device guard that does nothing.
#include <c10/core/impl/DeviceGuardImplInterface.h>
static c10::impl::DeviceGuardImplRegistrar guard(
    c10::DeviceType::CUDA, new c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>());
