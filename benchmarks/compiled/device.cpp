// A CUDA device on which nothing runs: what PyTorch's C++ asks for while it traces fake tensors, in a build without CUDA.
// It must be loaded before torch is imported, which asks once whether there is a device.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

using c10::Device, c10::DeviceIndex, c10::DeviceType, c10::Stream;

struct Guard final : c10::impl::DeviceGuardImplInterface {
    DeviceType type() const override { return DeviceType::CUDA; }
    Device exchangeDevice(Device) const override { return getDevice(); }
    Device getDevice() const override { return Device(DeviceType::CUDA, 0); }
    void setDevice(Device) const override {}
    void uncheckedSetDevice(Device) const noexcept override {}
    Stream getStream(Device device) const override { return Stream(Stream::DEFAULT, device); }
    Stream exchangeStream(Stream stream) const override { return stream; }
    DeviceIndex deviceCount() const noexcept override { return 1; }
    bool queryEvent(void *) const override { return true; }
};

struct Hooks final : at::CUDAHooksInterface {
    explicit Hooks(at::CUDAHooksArgs) {}
    void init() const override {}
    bool isBuilt() const override { return true; }
    bool isAvailable() const override { return true; }
    bool hasCUDA() const override { return true; }
    bool hasPrimaryContext(DeviceIndex) const override { return true; }
    DeviceIndex deviceCount() const override { return 1; }
    DeviceIndex getCurrentDevice() const override { return 0; }
    int getNumGPUs() const override { return 1; }
};

Guard guard;

const bool registered = [] {
    c10::impl::device_guard_impl_registry[static_cast<int>(DeviceType::CUDA)].store(&guard);
    at::CUDAHooksRegistry()->Register("CUDAHooks", [](at::CUDAHooksArgs arguments) {
        return std::unique_ptr<at::CUDAHooksInterface>(new Hooks(arguments));
    });
    return true;
}();

} // namespace
