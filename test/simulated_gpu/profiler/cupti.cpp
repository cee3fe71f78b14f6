// libcupti.so.13, through which PyTorch's profiler asks the driver about its devices: nothing is there to
// ask, and profiles hold what ran on the host. NVIDIA's own library needs the driver.
//
// Declared by hand, as those of the driver: only names and addresses matter here.
#define CUPTI_API extern "C" __attribute__((visibility("default")))

namespace {

enum CUptiResult { CUPTI_SUCCESS = 0, CUPTI_ERROR_NOT_SUPPORTED = 27 };

}  // namespace

CUPTI_API CUptiResult cuptiGetVersion(unsigned* version) {
  *version = 130200;
  return CUPTI_SUCCESS;
}

CUPTI_API CUptiResult cuptiGetResultString(CUptiResult /*result*/, const char** text) {
  *text = "CUPTI is not simulated";
  return CUPTI_SUCCESS;
}

#define NOT_SIMULATED(name) \
  CUPTI_API CUptiResult name() { return CUPTI_ERROR_NOT_SUPPORTED; }
NOT_SIMULATED(cuptiActivityDisable)
NOT_SIMULATED(cuptiActivityEnable)
NOT_SIMULATED(cuptiActivityEnableCudaEventDeviceTimestamps)
NOT_SIMULATED(cuptiActivityEnableDriverApi)
NOT_SIMULATED(cuptiActivityEnableRuntimeApi)
NOT_SIMULATED(cuptiActivityFlushAll)
NOT_SIMULATED(cuptiActivityGetNextRecord)
NOT_SIMULATED(cuptiActivityGetNumDroppedRecords)
NOT_SIMULATED(cuptiActivityPopExternalCorrelationId)
NOT_SIMULATED(cuptiActivityPushExternalCorrelationId)
NOT_SIMULATED(cuptiActivityRegisterCallbacks)
NOT_SIMULATED(cuptiActivityRegisterTimestampCallback)
NOT_SIMULATED(cuptiActivitySetAttribute)
NOT_SIMULATED(cuptiEnableCallback)
NOT_SIMULATED(cuptiEnableDomain)
NOT_SIMULATED(cuptiFinalize)
NOT_SIMULATED(cuptiGetCallbackName)
NOT_SIMULATED(cuptiSubscribe)
NOT_SIMULATED(cuptiUnsubscribe)
